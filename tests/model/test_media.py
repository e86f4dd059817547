"""Packs with images, videos and audios against the plain model, called with one sequence at a time."""

import warnings

import pytest
import torch
from sees_and_hears import AUDIO, FAMILIES, IMAGE, SEE, alone, batch
from sees_and_hears_more import MORE

from rft_fn import model, packing, tree
from rft_fn.model import forward, media_inputs, packed_states, placeholders
from rft_fn.model.forward import ONE_SEQUENCE, text_inputs
from rft_fn.model.parts import find
from rft_fn.strategy import get_fake_strategy
from rft_fn.types import Media, Packed

pytestmark = pytest.mark.slow

CLOSE = 1e-10


@pytest.fixture(autouse=True)
def _double(monkeypatch):
    """Families that compute their norms in float32 do so in float64."""
    single = torch.Tensor.float

    def wide(x, *args, **kwargs):
        if x.dtype == torch.float64:
            return x
        return single(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "float", wide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def made(family, seed=1):
    """A model, a batch, and what the plain model makes of each row: (log-probs, entropies) [T]."""
    module = family.build()
    exp = batch(family, family.rows(), seed=seed)
    rows = []
    for row in range(len(exp.length)):
        logits = alone(family, module, exp, row).logits[0, :-1].log_softmax(-1)
        logp = logits.gather(-1, exp.tokens[row, 1 : exp.length[row], None])[:, 0]
        entropy = -(logits.exp() * logits).sum(-1)
        rows.append(torch.stack([logp, entropy], -1) * exp.mask[row, 1 : exp.length[row], None])
    return module, exp, rows


def cuts(size):
    """Every cut of `size` rows, in this order and in reverse, into packs."""
    for bits in range(2 ** (size - 1)):
        packs = [[0]]
        for row in range(1, size):
            if bits >> (row - 1) & 1:
                packs.append([])
            packs[-1].append(row)
        yield packs
        yield [[size - 1 - row for row in rows] for rows in packs]


def gradient(total, module):
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(total, list(params.values()), allow_unused=True)
    return {name: g for name, g in zip(params, found) if g is not None}


def assert_same_gradient(got, want):
    """Gradients equal up to 1e-10 of the largest one of their parameter, or of rounding of all."""
    assert set(got) == set(want)
    least = 1e-6 * max(g.abs().max() for g in want.values())
    for name, g in want.items():
        off = (got[name] - g).abs().max() / g.abs().max().clamp(min=least)
        assert off <= CLOSE, f"{name}: {off:.1e}"


def weights(exp, rows):
    return [exp.w[row, 1 : exp.length[row]] for row in rows]


def test_log_probs_and_entropies_are_those_of_each_sequence_alone_in_every_cut(family):
    module, exp, rows = made(family)
    want = [x.detach() for x in rows]
    apply, params = model.bind(module, entropy=True)
    with torch.no_grad():
        for packs in cuts(5):
            for pack in packs:
                out = apply(params, packing.pack(exp, pack))
                expected = torch.cat([want[row] for row in pack])
                own = len(expected)  # behind them are rows that the pack borrowed for their media
                assert (out.logp[:own] - expected[:, 0]).abs().max() <= CLOSE
                assert (out.entropy[:own] - expected[:, 1]).abs().max() <= CLOSE
                assert not out.logp[own:].any()
    assert apply.root.mode != ONE_SEQUENCE


def test_gradients_are_those_of_each_sequence_alone(family):
    module, exp, rows = made(family)
    every = range(len(rows))
    total = sum((w * x[:, 0]).sum() for w, x in zip(weights(exp, every), rows))
    want = gradient(total, module)
    apply, params = model.bind(module)
    for packs in ([list(every)], [[2, 1, 0], list(every)[3:][::-1]]):
        batches = [packing.pack(exp, pack) for pack in packs]
        total = sum((b.w * apply(params, b).logp).sum() for b in batches)
        assert_same_gradient(gradient(total, module), want)


def test_values_of_a_critic_are_those_of_each_sequence_alone(family):
    module, exp, _ = made(family)
    hidden = []
    decoder = find(module).decoder
    handle = decoder.register_forward_hook(lambda _, __, out: hidden.append(out.last_hidden_state[0, :-1]))
    for row in range(len(exp.length)):
        alone(family, module, exp, row)
    handle.remove()
    critic = model.Critic(family.build())
    torch.nn.init.normal_(critic.head.weight, std=0.1)
    apply, params = model.bind(critic)
    pack = packing.pack(exp, range(len(exp.length)))
    want = critic.head(torch.cat(hidden))[:, 0] * pack.mask
    got = apply(params, pack).value
    assert (got - want).abs().max() <= CLOSE
    # the towers of the module that was called, and those of the critic, get the same gradient
    head = {name for name in params if name.startswith("head.")}
    own = gradient((pack.w * want).sum(), decoder)
    found = gradient((pack.w * got).sum(), critic)
    assert_same_gradient(
        {name.removeprefix("decoder."): g for name, g in found.items() if name not in head}, own
    )


def test_padding_and_an_empty_pack_change_nothing(family):
    module, exp, rows = made(family)
    apply, params = model.bind(module)
    pack = packing.pack(exp, [1, 2, 0])
    padded = packing.pad(pack, len(pack.tokens) + 5)
    want = torch.cat([rows[row][:, 0] for row in (1, 2, 0)])
    with torch.no_grad():
        got = apply(params, padded).logp
        assert (got[: len(want)] - want).abs().max() <= CLOSE
        assert not got[len(want) :].any()
        assert not apply(params, packing.placeholder(pack)).logp.any()


AXES = ["Qwen2VL", "Qwen2.5VL", "Qwen3VL", "Qwen2.5Omni"]


def farthest(name, spoil, monkeypatch, rows=None):
    """The largest error of a log-prob where `spoil` changes the inputs of the model [nats]."""
    family = FAMILIES[name]
    module, exp, want = made(family)
    apply, params = model.bind(module)
    own = forward.text_inputs
    monkeypatch.setattr(forward, "text_inputs", lambda lm, b, *a, **k: spoil(own(lm, b, *a, **k), b))
    every = rows or list(range(len(want)))
    got = apply(params, packing.pack(exp, every)).logp
    every = torch.cat([want[row][:, 0] for row in every])
    return (got[: len(every)] - every).abs().max()


@pytest.mark.parametrize("name", AXES)
def test_positions_of_text_are_not_those_of_images(name, monkeypatch):
    wrong = farthest(name, lambda inputs, b: inputs | {"position_ids": b.pos[None]}, monkeypatch)
    assert wrong > 0.1


@pytest.mark.parametrize("name", [*AXES, "SmolVLM", "Llava", "InternVL", "Gemma3", "Voxtral", "PaliGemma"])
def test_forgotten_boundaries_are_seen(name, monkeypatch):
    def forget(inputs, b):
        size = len(b.tokens)
        return {k: x for k, x in inputs.items() if k != "rft_bounds"} | {
            "attention_mask": torch.ones(1, size)
        }

    assert farthest(name, forget, monkeypatch) > 0.1


@pytest.mark.parametrize("name", ["Gemma3", "PaliGemma"])
def test_token_types_of_images_are_not_those_of_text(name, monkeypatch):
    def forget(inputs, b):
        return {k: x for k, x in inputs.items() if k != "token_type_ids"}

    assert farthest(name, forget, monkeypatch) > 0.01


def test_a_model_whose_own_attention_leaks_gets_one_sequence_at_a_time():
    """Gemma 3 without the boundaries of this library mixes the sequences of a pack, also its images."""
    family = FAMILIES["Gemma3"]
    module, exp, want = made(family)
    module.set_attn_implementation("eager")
    apply, params = model.bind(module)
    assert apply.root.mode == ONE_SEQUENCE
    pack = packing.pack(exp, range(len(want)), unit=len(want))
    got = apply(params, pack).logp
    assert (got - torch.cat(want)[:, 0]).abs().max() <= 1e-5  # eager attention is in float32
    with pytest.raises(ValueError, match="expected one sequence"):
        apply(params, packing.pack(exp, range(len(want))))


def test_a_model_that_mixes_sequences_where_placeholders_stand_gets_one_at_a_time():
    """Words alone would not show it."""
    module, _, _ = made(FAMILIES["Qwen2VL"])
    place = min(placeholders.placeholders(module.config))

    def leaks(embedding, args, out):
        return out + 0.1 * (args[0] == place).sum()

    assert model.bind(module)[0].root.mode != ONE_SEQUENCE
    module.get_input_embeddings().register_forward_hook(leaks)
    assert model.bind(module)[0].root.mode == ONE_SEQUENCE


@pytest.mark.parametrize("separate", [True, False])
def test_a_model_with_states_takes_rows_with_and_without_media(separate, monkeypatch):
    """Qwen3.5 in one pack, and one at a time: behind a row of words one that has an image."""
    if not separate:
        monkeypatch.setattr(packed_states, "separated", lambda lm: 0)
    family = MORE["Qwen3.5"]
    module, exp, want = made(family)
    st = get_fake_strategy()
    apply, params = st.bind(module)
    packs = st.shard(exp, 1000)
    if separate:
        assert [b.num_seqs for b in packs] == [len(exp.length)]
    else:
        assert [b.num_seqs for b in packs if b.rows == (1,)] == [2]
    got = packing.unpack([apply(params, b).logp for b in packs], packs, exp.tokens)
    for row, x in enumerate(want):
        assert (got[row, 1 : exp.length[row]] - x[:, 0]).abs().max() <= CLOSE


def spoilt(name, change):
    """The error for a batch of three rows (two media, none, one) that `change` has changed."""
    family = FAMILIES[name]
    exp = change(batch(family, family.rows()[:3]))
    apply, params = model.bind(family.build())
    with pytest.raises(ValueError) as error:
        apply(params, packing.pack(exp, [0, 1, 2]))
    return str(error.value)


def without(exp):
    return tree.replace(exp, media=None)


def one_of_two(exp):
    """The second image, or audio, of row 0 is missing."""
    tensors = {name: x.split(exp.media.rows[name].tolist()) for name, x in exp.media.tensors.items()}
    first = {name: x[0][: len(x[0]) // 2] for name, x in tensors.items()}
    if "image_grid_thw" in first:
        first["pixel_values"] = tensors["pixel_values"][0][: int(first["image_grid_thw"].prod())]
    last = {name: x[1] for name, x in tensors.items()}
    return tree.replace(exp, media=Media.of_prompts([first, None, last]))


def of_another(exp):
    """Row 1 reads the media of row 2, which has none then."""
    return tree.replace(exp, media=tree.replace(exp.media, of=torch.tensor([0, 1, -1])))


def sampled(token):
    def change(exp):
        tokens = exp.tokens.clone()
        tokens[1, exp.length[1] - 2] = token
        return tree.replace(exp, tokens=tokens)

    return change


@pytest.mark.parametrize(
    "name, change, message",
    [
        (
            "Qwen2VL",
            without,
            "sequence 0 of the pack: expected 0 image placeholders (token 50) for its 0 images",
        ),
        (
            "Llava",
            without,
            "sequence 0 of the pack: expected 0 image placeholders (token 50) for its 0 images",
        ),
        ("Qwen2Audio", without, "sequence 0 of the pack: expected 0 audio placeholders (token 52)"),
        ("Qwen2VL", one_of_two, "for its 1 images"),
        ("Llava", one_of_two, "expected 4 image placeholders (token 50) for its 1 images, got 8"),
        ("Qwen2Audio", one_of_two, "for its 1 audios"),
        ("Voxtral", of_another, "sequence 1 of the pack"),
        ("LlavaNext", of_another, "sequence 1 of the pack: expected 1 image placeholders"),
        ("Mistral3", of_another, "sequence 1 of the pack: expected"),
        ("SmolVLM", of_another, "sequence 1 of the pack: expected"),
        ("Qwen2VL", sampled(IMAGE), "for its 0 images, got 1, 1 of them sampled"),
        ("Qwen2Audio", sampled(AUDIO), "for its 0 audios, got 1, 1 of them sampled"),
    ],
)
def test_placeholders_that_are_not_those_of_the_media(name, change, message):
    assert message in spoilt(name, change)


def test_a_pack_of_one_sequence_that_lost_an_image():
    family = FAMILIES["Llava"]
    exp = one_of_two(batch(family, family.rows()[:3]))
    apply, params = model.bind(family.build())
    with pytest.raises(ValueError, match="sequence 0 of the pack: 8 image placeholders for 1 images"):
        apply(params, packing.pack(exp, [0]))


def test_tensors_that_a_model_does_not_take():
    family = FAMILIES["Llava"]
    exp = batch(family, [["image"], []])
    sound = Media.of_prompts([{"input_features": torch.zeros(1, 8, 32)}])
    exp = tree.replace(exp, media=Media.concat([exp.media.take([0]), sound], [1, 1]))
    apply, params = model.bind(family.build())
    with pytest.raises(ValueError, match=r"for vision_language, got \[.input_features.\]"):
        apply(params, packing.pack(exp, [0, 1]))


@pytest.mark.parametrize("name", ["Qwen2.5Omni", "Qwen2VL"])
def test_what_the_policy_sampled_is_text(name):
    """A start of an image or audio in a response is a word: it moves no position, and is scored."""
    family = FAMILIES[name]
    module = family.build()
    exp = batch(family, [["image"], []])
    tokens = exp.tokens.clone()
    tokens[0, exp.length[0] - 2] = SEE
    exp = tree.replace(exp, tokens=tokens)
    apply, params = model.bind(module)
    got = apply(params, packing.pack(exp, [0])).logp
    assert got[-1] < 0

    # the axes are those of the prompt, and behind it one step a token
    axes = media_inputs.media_inputs(module, packing.pack(exp, [0]))["position_ids"][1:, 0]
    response = int(exp.mask[0].sum())
    steps = axes[:, -response:].diff(dim=-1)
    assert (steps == 1).all()


def test_a_prompt_that_is_trained_too_is_read_as_it_stands():
    family = FAMILIES["Qwen2VL"]
    exp = batch(family, [["image"], ["image"]])
    whole = torch.arange(exp.tokens.shape[1]) < exp.length[:, None]
    pack = packing.pack(exp, [0, 1])
    trained = packing.pack(tree.replace(exp, mask=whole), [0, 1])
    module = family.build()
    want = media_inputs.media_inputs(module, pack)
    got = media_inputs.media_inputs(module, trained)
    assert torch.equal(got["position_ids"], want["position_ids"])
    assert torch.equal(got["mm_token_type_ids"], want["mm_token_type_ids"])


def test_placeholders_are_found_in_the_config():
    found = {name: placeholders.placeholder_ids(f.make().config) for name, f in FAMILIES.items()}
    assert found["Qwen2VL"] == {50, 51}
    assert found["Qwen2.5Omni"] == {50, 51, 52}
    assert found["Qwen2Audio"] == found["Voxtral"] == {52}
    assert found["Gemma3"] == found["Llava"] == found["SmolVLM"] == {50}
    assert placeholders.placeholder_ids(MORE["Ovis2"].make().config) == {50, 57, 58, 59, 60, 61}
    assert not placeholders.placeholder_ids(model.load("tiny").config)


def test_media_of_a_text_model():
    exp = batch(FAMILIES["Llava"], [["image"]])
    apply, params = model.bind(model.load("tiny"))
    with pytest.raises(ValueError, match=r"media: expected none for language_only, got \[.pixel_values.\]"):
        apply(params, packing.pack(exp, [0]))


def test_a_model_with_attention_across_to_images_is_one_of_text():
    import transformers

    text = {"num_hidden_layers": 2, "cross_attention_layers": [1]}
    with torch.device("meta"):
        lm = transformers.MllamaForConditionalGeneration(transformers.MllamaConfig(text_config=text))
    assert placeholders.placeholder_ids(lm.config)
    assert not placeholders.sees_or_hears(lm)
    pack = packing.pack(batch(FAMILIES["Llava"], [["image"]]), [0])
    with pytest.raises(ValueError, match="media: expected None, MllamaForConditionalGeneration is bound as"):
        text_inputs(lm, pack)


def test_pixels_come_in_the_type_of_the_towers():
    family = FAMILIES["Llava"]
    module = family.build(torch.float32)
    pack: Packed = packing.pack(batch(family, [["image"]]), [0])
    assert pack.media.tensors["pixel_values"].dtype == torch.float64
    assert media_inputs.media_inputs(module, pack)["pixel_values"].dtype == torch.float32
