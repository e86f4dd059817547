"""The parts of a model: decoder, text model, towers, head, and the axis over which packs are split."""

import copy

import pytest
import tiny
import torch
from families import hearing, seeing, small
from torch import nn

import rft_fn as rft
from rft_fn import model
from rft_fn.model import parts
from rft_fn.model.bounds import SequenceBounds
from rft_fn.model.lora_targets import find_targets


def names(module, found):
    """The parts by their names inside of a module; towers as a list."""
    path = {id(m): name for name, m in module.named_modules()}
    one = {name: path.get(id(getattr(found, name))) for name in ("decoder", "text", "head")}
    return one | {"towers": [path[id(m)] for m in found.towers]}


TEXT = {
    "Llama": {"decoder": "model", "text": "model", "head": "lm_head", "towers": []},
    "GPT2": {"decoder": "transformer", "text": "transformer", "head": "lm_head", "towers": []},
    "OPT": {"decoder": "model", "text": "model.decoder", "head": "lm_head", "towers": []},
    "Mamba": {"decoder": "backbone", "text": "backbone", "head": "lm_head", "towers": []},
    "Llama4Text": {"decoder": "model", "text": "model", "head": "lm_head", "towers": []},
}


@pytest.mark.parametrize("kind", TEXT)
def test_parts_of_a_text_model(kind):
    lm = small(kind, torch.float32)
    found = parts.find(lm)
    assert found.model is lm and found.sequence is None and found.has_linear_head
    assert names(lm, found) == TEXT[kind]
    assert parts.text_config(lm) is lm.config


@pytest.mark.parametrize(
    ("make", "towers"),
    [(seeing, ["model.visual"]), (hearing, ["model.audio_tower", "model.multi_modal_projector"])],
)
def test_parts_of_a_model_that_sees_or_hears(make, towers):
    lm = make()
    found = parts.find(lm)
    assert names(lm, found) == {
        "decoder": "model", "text": "model.language_model", "head": "lm_head", "towers": towers
    }  # fmt: skip
    assert parts.text_config(lm) is lm.config.text_config is not lm.config
    assert model.text_model(lm) is lm.model.language_model
    # the paths of adapters follow from the parts
    assert all(path.startswith("model.language_model.") for path in find_targets(lm, "auto").layers)
    assert any(path.startswith(towers[0]) for path in find_targets(lm, "all-linear").layers)


def test_a_critic_of_a_model_that_sees_keeps_its_tower():
    lm = seeing()
    critic = model.Critic(lm)
    assert critic.parts.model is critic.parts.decoder is lm.model
    assert critic.parts.text is lm.model.language_model and critic.parts.head is None
    assert critic.parts.towers == (lm.model.visual,)
    assert model.text_model(critic) is lm.model.language_model


def test_parts_are_found_inside_of_adapters():
    plain = tiny.llama()
    lora = model.apply_lora_configuration(plain, 2, 4)
    found = parts.find(lora)
    assert found.model is plain and found.decoder is plain.model and found.head is plain.lm_head
    headed = model.apply_lora_configuration(tiny.llama(), 2, 4)
    headed.base_model.model.lm_head = nn.Sequential(headed.base_model.model.lm_head)
    assert not parts.find(headed).has_linear_head


def test_a_bound_model_has_its_parts_and_so_has_a_copy():
    root = model.Scorer(tiny.llama(), rft.Sampling())
    assert parts.find(root) is root.parts and root.parts.model is root.lm
    twin = copy.deepcopy(root)
    assert twin.parts.decoder is twin.lm.model is not root.lm.model


def test_towers_of_a_model_that_no_name_explains():
    """As in files that come with a model: a text model by another name, a tower by a usual one."""
    whole = nn.ModuleDict({"llm": nn.Linear(2, 2), "vision_tower": nn.Linear(2, 2)})
    found = parts.find(whole)
    assert found.model is found.decoder is found.text is whole and found.head is None
    assert found.towers == (whole["vision_tower"],)
    assert parts.path_of(whole["llm"], whole) == "llm" and parts.path_of(whole, whole) == ""


class Axis:
    """A sequence axis of one process."""

    size, rank = 1, 0

    def split(self, pack):
        return pack, SequenceBounds([len(pack.tokens)], sequence=self)

    def join(self, out, size):
        return out

    def heads(self, q, k, v):
        return q, k, v

    def tokens(self, x):
        return x


def test_the_sequence_axis_is_a_part():
    lm = tiny.llama(dtype=torch.float64)
    pack = rft.packing.pack(tiny.experience(), [0])
    want = model.bind(copy.deepcopy(lm))[0](dict(lm.named_parameters()), pack).logp
    root = model.wrap_for_training(lm)
    axis = Axis()
    model.split_over(root, axis)
    assert root.parts.sequence is axis
    torch.testing.assert_close(root(pack).logp, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 2), "sp_size: expected 1 for Linear: it is no language model of transformers"),
        (
            lambda: model.wrap_for_training(small("Lfm2", torch.float32)),
            r"sp_size: expected 1 for Lfm2ForCausalLM: it has layers of \['conv'\]",
        ),
        (
            lambda: model.load_critic(small("Bloom", torch.float32)),
            "sp_size: expected 1 for BloomModel: it does not hand keyword arguments to its attention",
        ),
    ],
)
def test_models_that_cannot_share_the_tokens_of_a_pack(make, message):
    with pytest.raises(ValueError, match=message):
        model.split_over(make(), Axis())
