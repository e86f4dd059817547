"""The estimate of memory of models that see or hear, against what the allocator hands out."""

from functools import partial

import pytest
import tiny
import torch
from sees_and_hears import FAMILIES
from test_memory import allocated, loss_fn
from test_probe import quiet

import rft_fn as rft
from rft_fn import memory, optim, packing
from rft_fn.memory.media_example import largest
from rft_fn.memory.trace import nbytes
from rft_fn.memory.without_values import Constants, Values
from rft_fn.strategy import StrategyConfig, estimate, get_fake_strategy

pytestmark = pytest.mark.slow


def example(kind, count=1, seed=3, prompts=0):
    family = FAMILIES[kind]
    tensors, ids = family.sample(family.kinds[:1] * count, seed=seed)
    return memory.Example(ids, {name: narrow(x) for name, x in tensors.items()}, prompts)


def narrow(x):
    if x.is_floating_point():
        return x.float()
    return x


def working(x):
    return x.gradients + x.activations + x.head + x.backward + x.gathered


def measured(lm, shown, tokens):
    """The most that a forward and backward allocate, of a pack that is full of an example."""
    ids, media = shown.repeated(shown.copies(tokens))
    media = {name: torch.randn(x.shape) if x.is_meta else x for name, x in media.items()}
    exp = packing.supervised([(ids[:1], ids[1:] + [2] * (tokens + 1 - len(ids)))])
    exp = rft.tree.replace(exp, media=rft.Media.of_prompts([media]))
    st = get_fake_strategy()
    apply, state = quiet(st.init, lm, optim.adamw(1e-3), entropy=True)
    data = [packing.pack(exp, [0])] * 2
    st.grad(state, apply, loss_fn, data)
    return allocated(partial(st.grad, state, apply, loss_fn, data))[1]


def larger(kind):
    """A model of a few million parameters, most of them not embeddings."""
    lm = FAMILIES[kind].make()
    config = lm.config
    text = config.get_text_config()
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 128, 384, 4
    text.layer_types = ["full_attention"] * 4
    if kind == "Qwen2VL":
        text.rope_parameters["mrope_section"] = [4, 6, 6]
        config.vision_config.embed_dim, config.vision_config.hidden_size = 128, 128
        config.vision_config.depth, config.vision_config.num_heads = 4, 4
    else:
        config.audio_config.d_model, config.audio_config.encoder_ffn_dim = 128, 512
        config.audio_config.encoder_layers = 4
    return type(lm)(config)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("size", ["tiny", "larger"])
@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2Audio"])
def test_towers_and_their_activations_are_counted(kind, size, frozen):
    """A pack full of images or sounds: 0.8 to 1.4 of what it allocates, and more than one of text."""
    made = {"tiny": lambda: FAMILIES[kind].build(torch.float32), "larger": lambda: larger(kind)}
    lm = made[size]()
    if frozen:
        lm = rft.model.freeze(lm, ["towers"])
    tokens, shown = 256, example(kind, count=2)
    of = partial(estimate, StrategyConfig(), (lm, optim.adamw(1e-3)), budget=tokens, kind="cpu", engine=False)
    x, text = of(example=shown), of()
    assert x.unknown == text.unknown == ()
    assert x.parameters == text.parameters == nbytes(*lm.parameters())
    assert x.gradients == nbytes(*(p for p in lm.parameters() if p.requires_grad))
    peak = measured(lm, shown, tokens)
    print(f"{kind} {size}, frozen {frozen}: {working(x) / peak:.2f} of the peak")
    assert 0.8 < working(x) / peak < 1.4
    if not frozen:
        assert x.activations > 1.2 * text.activations


# its model takes one image in a sequence for another thing than several
ODD = {"LlavaOnevision"}


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in ODD])
def test_all_families_are_traced_without_values(kind):
    """The sizes of images and the places of tokens are read on the way."""
    lm = FAMILIES[kind].build(torch.float32)
    of = partial(estimate, StrategyConfig(), (lm, optim.adamw(1e-3)), budget=96, kind="cpu", engine=False)
    with_media, text = of(example=example(kind)), of()
    assert with_media.unknown == text.unknown == ()
    assert with_media.activations > text.activations > 0


def test_a_model_that_cannot_be_traced_with_media_is_counted_with_text():
    lm = FAMILIES["Qwen2VL"].build(torch.float32)
    shown = example("Qwen2VL")
    broken = memory.Example(shown.ids[:-4], shown.media)
    of = partial(estimate, StrategyConfig(), (lm, optim.adamw(1e-3)), budget=96, kind="cpu", engine=False)
    x, text = of(example=broken), of()
    assert x.activations == text.activations > 0
    assert len(x.unknown) == 1 and x.unknown[0].startswith(
        "activations of Qwen2VLForConditionalGeneration with"
    )


def test_media_are_held_once_a_prompt_on_the_host_and_a_pack_of_them_on_the_device():
    lm, shown = FAMILIES["Qwen2VL"].build(torch.float32), example("Qwen2VL", prompts=32)
    one = nbytes(*shown.media.values())
    assert shown.nbytes == one > 0
    fits = 96 // len(shown.ids)
    of = partial(estimate, StrategyConfig(), (lm, optim.adamw(1e-3)), budget=96, engine=False)
    gpu, cpu = of(kind="cuda", example=shown), of(kind="cpu", example=shown)
    assert (gpu.media, gpu.host) == (fits * one, 32 * one)
    assert (cpu.media, cpu.host) == ((fits + 32) * one, 0)
    assert gpu.training - of(kind="cuda", example=shown._replace(prompts=0)).training == 0
    text = of(kind="cpu")
    assert text.media == 0 and cpu.training > text.training + cpu.media
    assert "images and sounds" in memory.table(cpu, available=2**30, host=2**30, remedy="")

    # a text model reads none
    of = partial(estimate, StrategyConfig(), (tiny.llama(), optim.adamw(1e-3)), budget=96, engine=False)
    assert of(kind="cuda", example=shown).activations == of(kind="cuda").activations


def test_processes_that_share_the_tokens_have_all_towers_each():
    lm, shown = FAMILIES["Qwen2VL"].build(torch.float32), example("Qwen2VL", count=2)
    models = (lm, optim.adamw(1e-3))
    found = {}
    for n in (1, 2):
        layout = memory.Layout(sequence=n)
        of = partial(memory.estimate, layout, models, budget=256, kind="cpu")
        found[n] = [of(example=e).activations for e in (shown, None)]
    towers = found[1][0] - found[1][1]
    assert found[2][0] - found[2][1] == towers > 0
    assert found[2][1] < 0.6 * found[1][1]


def test_the_largest_prompt_is_the_example():
    prompts = [rft.data.Prompt([5, 6], "", {}, 0)]
    assert largest(prompts) is None
    sizes = [8, 32, 16]
    for i, rows in enumerate(sizes):
        prompt = rft.data.Prompt([i], "", {}, i)
        object.__setattr__(prompt, "media", {"pixel_values": torch.zeros(rows, 4)})
        prompts.append(prompt)
    found = largest(prompts, 7)
    assert found.ids == [1] and found.nbytes == 32 * 4 * 4 and found.prompts == 7


def test_whole_numbers_keep_their_values_on_the_meta_device():
    values = Values()
    sizes = values.on_meta(torch.tensor([[1, 4, 6], [1, 2, 2]]))
    blind = torch.empty(4, 8, device="meta")
    with values, Constants(values):
        assert sizes.is_meta and sizes.tolist() == [[1, 4, 6], [1, 2, 2]] and int(sizes[0, 2]) == 6
        assert (2 * sizes[:, 1]).tolist() == [8, 4] and sizes.prod(-1).cpu().sum().item() == 28
        x = torch.zeros(3, dtype=torch.long, device="meta")
        x[1:] += torch.arange(2, device="meta") + 5  # a view, changed in place
        assert x.is_meta and x.tolist() == [0, 5, 6]
        assert torch.repeat_interleave(sizes[:, 1], sizes[:, 0]).tolist() == [4, 2]
        assert torch.tensor([3, 1], device="meta").tolist() == x.new_tensor([3, 1]).tolist() == [3, 1]
        assert (sizes[:, 0].float() * 1.5).sum().item() == 3.0

        # masks count the rows of tensors without values
        mask = torch.tensor([True, False, True, True], device="meta")
        assert blind[mask].shape == (3, 8) and blind.masked_select(mask[:, None]).shape == (24,)
        assert mask.nonzero().tolist() == [[0], [2], [3]]

        # a number without a value equals none; what it is written to has no value
        assert (blind == 0).sum().item() == 0 and (blind != 0).all().item()
        x.copy_(blind[0, :3])
        assert values._value(x) is None and values._value(blind + sizes[0, 0]) is None
