"""Prompts with media: places widened, tensors of the right rows, processed once, and bad rows refused."""

import io
import json
import warnings
import wave

import numpy as np
import pytest
import torch
from PIL import Image
from sees_and_hears import FAMILIES
from test_probe import quiet

import rft_fn as rft
from rft_fn import data, model
from rft_fn.environment.tiny_media_models import AUDIO, VISION
from rft_fn.environment.tiny_models import new_tokenizer
from rft_fn.model.processors import PatchProcessor
from rft_fn.types import Media


def tokenizer_of(form):
    tokenizer = new_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(form.tokens)})
    tokenizer.chat_template = form.template
    return tokenizer


@pytest.fixture(scope="module")
def sees():
    return VISION.new_processor(tokenizer_of(VISION))


@pytest.fixture(scope="module")
def hears():
    return AUDIO.new_processor(tokenizer_of(AUDIO))


def picture(folder, name, colour=(255, 0, 0), size=(16, 16)):
    Image.new("RGB", size, colour).save(folder / name)
    return name


def sound(folder, name, *, seconds=0.5, rate=16000):
    with wave.open(str(folder / name), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((np.sin(np.arange(round(seconds * rate)) / 9) * 9000).astype("<i2").tobytes())
    return name


def rows_file(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(source, processor, *, limits=None, **how):
    processing = None
    tokenizer = model.load_tokenizer("tiny")
    if processor is not None:
        processing = data.Processing(processor, limits or data.MediaLimits())
        tokenizer = processor.tokenizer
    if "messages" not in how:
        how["template"] = how.get("template", "{q}")
    return data.load(source, tokenizer, processing=processing, **how)


def test_rows_with_two_images_one_or_none_stand_in_one_file(tmp_path, sees):
    """Each prompt has 16 tokens for each image, and the patches of these in the order of the places."""
    red = picture(tmp_path, "red.png")
    blue = picture(tmp_path, "blue.png", (0, 0, 255))
    file = rows_file(
        tmp_path, {"q": "a<image>b<image>=", "images": [red, blue]}, {"q": "c=", "image": blue}, {"q": "d="}
    )
    two, one, none = (load(file, sees).prompt(i) for i in range(3))
    place = sees.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert [p.ids.count(place) for p in (two, one, none)] == [32, 16, 0]
    assert (two.media_names, one.media_names, none.media_names) == ((red, blue), (blue,), ())
    assert none.media is None and two.text == "a<image>b<image>="
    assert torch.equal(two.media["pixel_values"][64:], one.media["pixel_values"])
    assert not torch.equal(two.media["pixel_values"][:64], one.media["pixel_values"])
    assert two.media["image_grid_thw"].tolist() == [[1, 8, 8]] * 2

    # the text around the places is what it is alone
    text = sees.tokenizer.decode([i for i in two.ids if i < tokenizer_base()])
    assert text == "ab="


def tokenizer_base():
    return len(new_tokenizer())


def test_messages_with_parts_are_prompts_and_lessons_with_the_media_before_their_end(tmp_path, sees):
    red = picture(tmp_path, "red.png")
    blue = picture(tmp_path, "blue.png", (0, 0, 255))
    talk = [
        {"role": "user", "content": [{"type": "image", "image": red}, {"type": "text", "text": "a="}]},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "b="}, {"type": "image"}]},
    ]
    asked = load(rows_file(tmp_path, {"messages": talk, "image": blue}), sees, messages=("messages",)).prompt(
        0
    )
    assert asked.media_names == (red, blue) and asked.media["image_grid_thw"].shape[0] == 2
    assert asked.messages[0]["content"][0] == {"type": "image", "image": red}

    learn = [*talk, {"role": "assistant", "content": "2"}]
    file = rows_file(tmp_path, {"messages": learn, "image": blue})
    prompt = load(file, sees, messages=("messages",), loss_on="all", max_tokens=200).prompt(0)
    lessons = data.lessons(prompt, sees.tokenizer, messages=("messages",), loss_on="all")
    place = sees.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for lesson in lessons:
        assert lesson.ids.count(place) == 16 * lesson.media["image_grid_thw"].shape[0]
    assert max(lesson.media["image_grid_thw"].shape[0] for lesson in lessons) == 2
    assert prompt.media["image_grid_thw"].shape[0] == 1  # before the first learned token

    # a batch of lessons holds the media of each
    exp = rft.packing.conversations(lessons)
    counts = [len(lesson.media["image_grid_thw"]) for lesson in lessons]
    assert exp.media.count("image_grid_thw").tolist() == counts


def test_audio_of_any_rate_is_heard_at_the_processors(tmp_path, hears):
    file = rows_file(
        tmp_path,
        {"q": "a=", "audio": sound(tmp_path, "a.wav")},
        {"q": "a=", "audio": sound(tmp_path, "b.wav", rate=8000)},
    )
    with pytest.warns(UserWarning, match=r"rows.jsonl, line 2: b.wav: 8000 Hz are resampled to 16000 Hz"):
        found = load(file, hears)
    first, second = found.prompt(0), found.prompt(1)
    assert first.media["input_features"].shape == second.media["input_features"].shape == (1, 16, 100)
    assert int(first.media["feature_attention_mask"].sum()) == 50
    place = hears.tokenizer.convert_tokens_to_ids("<|AUDIO|>")
    assert first.ids.count(place) == second.ids.count(place) == 12


def test_a_prompt_is_processed_once_for_its_content(tmp_path, sees):
    """Whatever the file is called; other pixels, other text and other limits are other contents."""
    calls = []

    class Counted(PatchProcessor):
        def __call__(self, text, **how):
            calls.append(text)
            return super().__call__(text, **how)

    counted = Counted(sees.image_processor, sees.tokenizer)
    picture(tmp_path, "a.png")
    file = rows_file(tmp_path, *[{"q": "a=", "image": "a.png"}] * 5)
    found = load(file, counted, limits=data.MediaLimits(cache=str(tmp_path / "cache")))
    first = found.prompt(0)
    assert len(calls) == 1
    again = load(file, counted, limits=data.MediaLimits(cache=str(tmp_path / "cache")))
    assert len(calls) == 1 and torch.equal(again.prompt(3).media["pixel_values"], first.media["pixel_values"])
    assert again.digest == found.digest
    picture(tmp_path, "a.png", (0, 255, 0))
    changed = load(file, counted, limits=data.MediaLimits(cache=str(tmp_path / "cache")))
    assert len(calls) == 2 and changed.digest != found.digest


def test_patches_of_a_video_are_those_of_its_frames(sees):
    """By the layout of Qwen2-VL: a patch of two frames holds channel by channel first one, then the other."""
    rng = np.random.default_rng(0)
    frames = [Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)) for _ in range(3)]
    out = sees(["x<|video_pad|>y"], videos=[frames])
    assert out["video_grid_thw"].tolist() == [[2, 8, 8]]
    alone = [sees(["<|image_pad|>"], [frame])["pixel_values"].view(64, 3, 2, 4) for frame in frames]
    found = out["pixel_values_videos"].view(2, 64, 3, 2, 4)
    for pair, (a, b) in enumerate(((0, 1), (2, 2))):
        assert torch.equal(found[pair, :, :, 0], alone[a][:, :, 0])
        assert torch.equal(found[pair, :, :, 1], alone[b][:, :, 1])
    assert (out["input_ids"] == sees.tokenizer.convert_tokens_to_ids("<|video_pad|>")).sum() == 32


def test_processors_come_back_from_their_folder(tmp_path, sees, hears):
    for name, processor, form in (("vl", sees, VISION), ("audio", hears, AUDIO)):
        folder = tmp_path / name
        rft.model.save(folder, form.new_model(processor.tokenizer), processor)
        found = model.load_processor(folder)
        assert type(found) is type(processor)
        assert found.tokenizer.get_vocab() == processor.tokenizer.get_vocab()
        assert model.load_tokenizer(folder).chat_template == form.template
    assert model.load_processor("tiny") is None


def test_a_folder_with_towers_and_no_processor_is_refused(tmp_path, sees):
    rft.model.save(tmp_path / "vl", VISION.new_model(sees.tokenizer), sees.tokenizer)
    with pytest.raises(ValueError, match=r"has vision_config, but no processor for what it sees or hears"):
        model.load_processor(tmp_path / "vl")


def places_of(mark):
    """A chat template that puts a mark for each image."""
    return (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% else %}"
        + mark
        + "{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )


def llava(tokenizer):
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    images = CLIPImageProcessorPil(**sizes)
    how = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tokenizer, **how)


def idefics3(tokenizer):
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    sizes = {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}}
    images = Idefics3ImageProcessorPil(**sizes, do_image_splitting=False)
    return Idefics3Processor(images, tokenizer, image_seq_len=4)


@pytest.mark.parametrize("make", [llava, idefics3])
def test_processors_of_transformers_count_as_their_models_do(tmp_path, make):
    """Saved with a small model of the family, loaded, and two images of a prompt read by that model."""
    names = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer = new_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.chat_template = places_of("<image>")
    family = {llava: FAMILIES["Llava"], idefics3: FAMILIES["Idefics3"]}[make]
    config = family.make().config
    config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    config.text_config.vocab_size = len(tokenizer)
    model.save(tmp_path / "model", type(family.make())(config), make(tokenizer))

    # one prompt from a file, by the processor of the folder
    red, blue = picture(tmp_path, "red.png"), picture(tmp_path, "blue.png", (0, 0, 255))
    file = rows_file(tmp_path, {"q": "a<image>b<image>=", "images": [red, blue]}, {"q": "c="})
    found = load(file, model.load_processor(tmp_path / "model"))
    prompt = found.prompt(0)
    assert prompt.ids.count(config.image_token_id) == 8 and found.prompt(1).media is None
    assert prompt.media["pixel_values"].shape == (2, 3, 16, 16)
    assert not torch.equal(*prompt.media["pixel_values"])

    # the model counts them as well, and what it sees matters
    apply, params = quiet(model.bind, model.load(tmp_path / "model"))
    exp = rft.packing.supervised([(prompt.ids, [5, 6]), (found.prompt(1).ids, [7])])
    swapped = {name: x.flip(0) for name, x in prompt.media.items()}
    scores = []
    for media in (prompt.media, swapped):
        seen = rft.tree.replace(exp, media=Media.of_prompts([media, None]))
        scores.append(apply(params, rft.packing.pack(seen, [0, 1])).logp)
    assert scores[0].isfinite().all() and not torch.equal(*scores)


def bad_rows(folder):
    picture(folder, "big.png", size=(300, 300))
    picture(folder, "ok.png")
    (folder / "empty.png").write_bytes(b"")
    (folder / "broken.png").write_bytes(b"no image")
    sound(folder, "long.wav", seconds=1.5)
    return [
        ("sees", {"q": "a=", "image": "empty.png"}, "empty.png is empty, 0 bytes"),
        ("sees", {"q": "a=", "image": "broken.png"}, "image broken.png: expected an image, got 8 bytes"),
        (
            "sees",
            {"q": "a=", "image": "https://x.y/z.png"},
            "is a URL, which is not fetched without --media-urls",
        ),
        ("sees", {"q": "a=", "image": "../z.png"}, "../z.png is outside of the data's folder"),
        (
            "sees",
            {"q": "a=<image><image>", "image": "ok.png"},
            "expected as many places as images, got 2 and 1",
        ),
        (
            "sees",
            {"q": "a=<|image_pad|>", "image": "ok.png"},
            "expected the chat template to render 1 places",
        ),
        (
            "sees",
            {"q": "a=", "audio": "long.wav"},
            "the row has audios, and the model reads text, images and",
        ),
        ("hears", {"q": "a=", "audio": "long.wav"}, "audio long.wav: expected at most 1 s, got 1.5 s"),
        ("text", {"q": "a=", "image": "ok.png"}, "the row has images, and the model reads text alone"),
    ]


@pytest.mark.parametrize("number", range(9))
def test_a_bad_row_is_one_line_with_its_file_and_line(number, tmp_path, sees, hears):
    name, row, message = bad_rows(tmp_path)[number]
    processor = {"sees": sees, "hears": hears, "text": None}[name]
    with pytest.raises(ValueError) as error:
        load(rows_file(tmp_path, {"q": "b="}, row), processor)
    text = str(error.value)
    assert message in text and "rows.jsonl, line 2: " in text and "\n" not in text


PAD = "<|image_pad|>"
TALK = [{"role": "user", "content": "a="}, {"role": "assistant", "content": "1"}]


@pytest.mark.parametrize(
    ("kind", "row", "options"),
    [
        (data.PROMPTS, {"q": f"a={PAD}"}, {}),
        (data.PROMPTS, {"q": "a=", "a": f"1{PAD}"}, {"response": "{a}"}),
        (data.PROMPTS, {"m": [{"role": "user", "content": PAD}]}, {"messages": ["m"]}),
        (
            data.PROMPTS,
            {"m": [*TALK, TALK[0], {**TALK[1], "content": f"{PAD}2"}]},
            {"messages": ["m"], "loss_on": "all"},
        ),
        (data.PAIRS, {"q": "a=", "chosen": PAD, "rejected": "2"}, {}),
        (data.PAIRS, {"q": PAD, "chosen": "1", "rejected": "2"}, {}),
        (data.PAIRS, {"chosen": f"a= {PAD}", "rejected": "a= 2"}, {"template": ""}),
        (data.LISTS, {"q": "a=", "completions": ["1", PAD], "scores": [1, 0]}, {}),
        (data.POINTS, {"q": "a=", "completion": PAD, "score": 1}, {}),
        (data.STEPS, {"q": "a=", "completions": ["1", PAD], "labels": [1, 0]}, {"separator": ""}),
    ],
)
def test_no_text_holds_the_place_of_an_image_by_itself(tmp_path, sees, kind, row, options):
    """A row without images is asked as one with them: the model would look for an image that is not there."""
    rows = [json.loads(json.dumps(row).replace(PAD, "3")), row]
    with pytest.raises(ValueError) as error:
        load(rows_file(tmp_path, *rows), sees, kind=kind, **options)
    assert "rows.jsonl, line 2: expected the chat template to render 0 places" in str(error.value)
    assert "no text may hold one by itself" in str(error.value)
    assert load(rows_file(tmp_path, rows[0]), sees, kind=kind, **options).size == 1


def test_large_images_are_shrunk_and_long_prompts_left_out_each_with_a_warning(tmp_path, sees):
    picture(tmp_path, "big.png", size=(300, 300))
    file = rows_file(tmp_path, {"q": "a=", "image": "big.png"}, {"q": "b="})
    with pytest.warns(UserWarning, match="line 1: big.png: 300 x 300 pixels are shrunk to 20 x 20"):
        load(file, sees, limits=data.MediaLimits(max_pixels=400))
    with pytest.warns(UserWarning, match="line 1 with 20 tokens, those of its media among them"):
        assert load(file, sees, max_prompt=10).size == 1


@pytest.mark.parametrize("seen", [True, False])
def test_a_prompt_and_its_response_fit_into_the_models_window(tmp_path, sees, seen):
    """An image of 16 tokens, its two marks and two of text, or the text alone, and 10 of the response."""
    picture(tmp_path, "a.png")
    rows, size = [{"q": "b="}, {"q": "a="}], 2
    if seen:
        rows, size = [{"q": "b="}, {"q": "a=", "image": "a.png"}], 20
    processor = {True: sees, False: None}[seen]
    file = rows_file(tmp_path, *rows)
    assert load(file, processor, window=size + 10, max_new=10).size == 2
    lines = {True: "line 2", False: "lines 1, 2"}[seen]
    has = rf"{lines}: the row has {size} \+ 10 tokens with max_new, .*window of {size + 9}; lower max_new"
    with pytest.raises(ValueError, match=f"rows.jsonl, {has}"):
        load(file, processor, window=size + 9, max_new=10)

    # a response that is there is counted too, with its end
    assert load(file, processor, response="12", window=size + 3).size == 2
    with pytest.raises(ValueError, match=rf"the row has {size + 3} tokens, .*window of {size + 2}; shorten"):
        load(file, processor, response="12", window=size + 2)


def test_a_task_that_is_seen_is_refused_by_a_text_model():
    with pytest.raises(ValueError, match="the row has images, and the model reads text alone"):
        data.load("count_squares", model.load_tokenizer("tiny"), template="{short}")


@pytest.mark.slow
def test_workers_make_the_same_prompts_and_leave_them_in_the_cache(tmp_path, sees):
    picture(tmp_path, "a.png")
    rows = [{"q": f"{i}=", "image": "a.png"} for i in range(3)]
    file = rows_file(tmp_path, *rows)
    limits = data.MediaLimits(cache=str(tmp_path / "cache"))
    made = load(file, sees, limits=limits, workers=1)
    assert made.digest == load(file, sees).digest and made.size == 3
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 3
    assert load(file, sees, limits=limits, workers=10**20).digest == made.digest


def test_tables_of_datasets_hold_media_as_they_are_stored(tmp_path, sees):
    import datasets

    file = io.BytesIO()
    Image.new("RGB", (16, 16), (255, 0, 0)).save(file, "PNG")
    features = datasets.Features({"q": datasets.Value("string"), "image": datasets.Image()})
    table = datasets.Dataset.from_dict(
        {"q": ["a="], "image": [{"bytes": file.getvalue(), "path": "a.png"}]}, features=features
    )
    table.to_parquet(str(tmp_path / "t.parquet"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompt = load(str(tmp_path / "t.parquet"), sees).prompt(0)
    assert prompt.media_names == ("a.png",) and prompt.columns["image"]["bytes"] == file.getvalue()
