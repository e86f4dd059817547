"""Processors of model folders: saved with a small model of the family, and loaded; the model counts alike."""

import numpy as np
import pytest
import torch
from PIL import Image
from sees_and_hears import FAMILIES
from test_probe import quiet

import rft_fn as rft
from rft_fn import data, model
from rft_fn.environment import tiny_models
from rft_fn.types import Media

MARKED = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}MARK"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def sees():
    """A tokenizer with the tokens of SmolVLM."""
    names = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    names += [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)]
    tokenizer = tiny_models.new_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.chat_template = MARKED.replace("MARK", "<image>")
    return tokenizer


def hears():
    """A tokenizer whose token 24 stands for audio, as in Voxtral's."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<end>", "<unk>", *"abcdefghijklmnopqrstu", "[AUDIO]", "[BEGIN_AUDIO]", *"0123456789="]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\[[A-Z_]+\]|."), "isolated")
    core.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    tokenizer.chat_template = MARKED.replace("MARK", "[BEGIN_AUDIO][AUDIO]")
    return tokenizer


def sound(seconds):
    """A tone, as `datasets` holds audio."""
    samples = np.sin(np.arange(round(seconds * 16000)) / 9).astype(np.float32) / 4
    return {"array": samples, "sampling_rate": 16000}


def rows(processor, *found):
    processing = data.Processing(processor, data.MediaLimits())
    made = data.from_rows(
        list(found), processor.tokenizer, template="{q}", name="rows", processing=processing
    )
    return [made.prompt(i) for i in range(made.size)]


def scores(folder, prompts, media):
    """The log-probs of a model that reads these prompts with these media."""
    apply, params = quiet(model.bind, model.load(folder))
    exp = rft.packing.supervised([(prompt.ids, [5, 6]) for prompt in prompts])
    exp = rft.tree.replace(exp, media=Media.of_prompts(media))
    return apply(params, rft.packing.pack(exp, range(len(prompts)))).logp


def smolvlm(folder, *, split=False):
    """A folder as the hub has them: the processor's config, and no packages for videos."""
    from transformers import Idefics3Processor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    config = FAMILIES["SmolVLM"].make().config
    tokenizer = sees()
    config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    config.text_config.vocab_size = len(tokenizer)
    model.save(folder, type(FAMILIES["SmolVLM"].make())(config), tokenizer)
    sizes = {"size": {"longest_edge": 32 if split else 16}, "max_image_size": {"longest_edge": 16}}
    images = SmolVLMImageProcessorPil(**sizes, do_image_splitting=split)
    Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(folder)
    about = folder / "processor_config.json"
    text = about.read_text().replace("Idefics3Processor", "SmolVLMProcessor")
    about.write_text(text)
    return tokenizer, config.image_token_id


@pytest.mark.parametrize("split", [False, True])
def test_smolvlm_is_read_without_torchvision_and_num2words(tmp_path, split):
    """An image is 4 tokens; cut into four tiles and the whole it is 20. The saved folder gives the same."""
    tokenizer, place = smolvlm(tmp_path / "model", split=split)
    images = [Image.new("RGB", (16, 16), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    row = {"q": "a<image>b<image>=", "images": images}
    processor = model.load_processor(tmp_path / "model")
    two, none = rows(processor, row, {"q": "c="})
    assert two.ids.count(place) == 2 * (4, 20)[split] and none.media is None
    text = tokenizer.decode(two.ids, skip_special_tokens=True)
    assert text.replace("<unk>", "") == "ab="  # the tiny vocabulary has no line breaks
    assert two.media["pixel_values"].shape == (2 * (1, 5)[split], 3, 16, 16)

    # the model counts them as well, and what it sees matters
    swapped = {name: x.flip(0) for name, x in two.media.items()}
    seen = [scores(tmp_path / "model", [two, none], [media, None]) for media in (two.media, swapped)]
    assert seen[0].isfinite().all() and not torch.equal(*seen)

    # what a run saves
    model.save(tmp_path / "saved", model.load(tmp_path / "model"), processor)
    again, _ = rows(model.load_processor(tmp_path / "saved"), row, {"q": "c="})
    assert again.ids == two.ids and torch.equal(again.media["pixel_values"], two.media["pixel_values"])


def voxtral(folder):
    """A small Voxtral that hears 2 s at a time: 200 frames, 25 tokens."""
    from transformers import VoxtralProcessor, WhisperFeatureExtractor

    tokenizer = hears()
    config = FAMILIES["Voxtral"].make().config
    config.audio_token_id = tokenizer.convert_tokens_to_ids("[AUDIO]")
    config.audio_config.max_source_positions = 100
    config.text_config.vocab_size = len(tokenizer)
    features = WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    module = type(FAMILIES["Voxtral"].make())(config)
    model.save(folder, module, VoxtralProcessor(features, tokenizer))
    return tokenizer


@pytest.mark.parametrize(("seconds", "chunks"), [(0.5, 1), (2.0, 1), (3.0, 2)])
def test_voxtral_hears_audio_longer_than_a_chunk(tmp_path, seconds, chunks):
    tokenizer = voxtral(tmp_path / "model")
    processor = model.load_processor(tmp_path / "model")
    long = sound(seconds)
    row = {"q": "a<audio>b<audio>=", "audios": [long, sound(0.1)]}
    both, none = rows(processor, row, {"q": "c="})
    place = tokenizer.convert_tokens_to_ids("[AUDIO]")
    assert both.ids.count(place) == 25 * (chunks + 1) and none.media is None
    assert tokenizer.decode([i for i in both.ids if i != place]) == "a[BEGIN_AUDIO]b[BEGIN_AUDIO]="

    # the chunks of an audio are its spectrogram filled up with silence, cut every 200 frames
    features = both.media["input_features"]
    assert features.shape == (chunks + 1, 8, 200)
    filled = np.zeros(chunks * 32000, np.float32)
    filled[: len(long["array"])] = long["array"]
    whole = processor.feature_extractor(
        filled, sampling_rate=16000, return_tensors="pt", truncation=False, padding=False
    )["input_features"][0]
    assert torch.allclose(torch.cat(list(features[:chunks]), -1), whole, atol=1e-5)

    # the model counts them as well, and what it hears matters
    swapped = {"input_features": features.flip(0)}
    heard = [scores(tmp_path / "model", [both, none], [media, None]) for media in (both.media, swapped)]
    assert heard[0].isfinite().all() and not torch.equal(*heard)

    # what a run saves
    model.save(tmp_path / "saved", model.load(tmp_path / "model"), processor)
    again, _ = rows(model.load_processor(tmp_path / "saved"), row, {"q": "c="})
    assert again.ids == both.ids


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ImportError("it requires the Torchvision library\nbut it was not found\n"), "it requires the Torch"),
        (OSError("no file named preprocessor_config.json"), "no file named preprocessor_config.json"),
        (ValueError(""), "ValueError"),
    ],
)
def test_a_processor_that_cannot_be_made_is_one_line_with_a_remedy(tmp_path, monkeypatch, error, why):
    """Of a family that has no processor here without torchvision."""
    import transformers

    family = FAMILIES["LlavaOnevision"].build(torch.float32)
    model.save(tmp_path / "model", family, sees())

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", fail)
    with pytest.raises(ValueError, match=f"has vision_config, but no processor for .*: {why}") as found:
        model.load_processor(tmp_path / "model")
    assert "pip install torchvision" in str(found.value) and "\n" not in str(found.value)


def test_a_place_without_audio_is_refused(tmp_path):
    voxtral(tmp_path / "model")
    processor = model.load_processor(tmp_path / "model")
    with pytest.raises(ValueError, match=r"expected 1 places \[AUDIO\], got 2"):
        processor(["[AUDIO][AUDIO]"], [np.zeros(100)], sampling_rate=16000)
