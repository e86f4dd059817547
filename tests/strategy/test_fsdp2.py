"""FSDP2 beyond the conformance suite: what is sharded, what is refused, and no stale weights."""

import conformance
import pytest
import ranks
import tiny
import torch
from torch import nn

from rft_fn import model, tree
from rft_fn.strategy import StrategyConfig, fork, fsdp2, get_strategy


def test_blocks_are_found_from_the_module():
    lm = tiny.llama(num_hidden_layers=3)
    assert fsdp2.blocks(lm) == list(lm.model.layers)
    assert (
        fsdp2.blocks(model.apply_lora_configuration(tiny.llama(), 2, 4))[0].__class__.__name__
        == "LlamaDecoderLayer"
    )
    experts = nn.ModuleList(
        nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))}) for _ in range(2)
    )
    assert fsdp2.blocks(nn.ModuleDict({"layers": experts})) == list(experts)
    assert fsdp2.blocks(nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Embedding(2, 2)])) == []


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(3, 3) for _ in range(2))})
        self.language_model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(3, 3) for _ in range(2))})


def test_the_text_model_of_two_parts():
    both = TwoParts()
    assert len(fsdp2.blocks(both)) == 4
    assert fsdp2.blocks(model.text_model(both)) == list(both.language_model.layers)
    assert model.text_model(lm := tiny.llama()) is lm


def test_parts_of_another_type_are_found():
    critic = model.Critic(tiny.llama(dtype=torch.bfloat16))
    assert fsdp2._odd(critic) == [critic.head] and fsdp2._odd(critic.decoder) == []


# the same on one process
ANOTHER_APPLY = [
    f"apply: expected the one that init gave with this state, got {found}; a model that computes something "
    "else is a module of its own: apply, state = st.init(module, tx)"
    for found in ("<lambda>", "that of another LlamaForCausalLM")
]


def refusals(rank):
    """Messages of what does not fit two processes."""

    def said(f):
        try:
            f()
        except ValueError as error:
            return str(error)

    st = get_strategy(StrategyConfig())
    apply, state = st.init(tiny.llama(), conformance.adamw())
    b = st.shard(conformance.experience(0, dtype=torch.float32), 40)[0]
    copies = tree.map(lambda p: p.detach().clone(), state.params)
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 36}

    def three_heads():
        sp = get_strategy(StrategyConfig(sp_size=2))
        call, own = sp.init(tiny.llama(**heads), conformance.adamw())
        call(own.params, b)

    return [
        said(lambda: get_strategy(StrategyConfig(sp_size=3))),
        said(lambda: get_strategy(StrategyConfig(shard_size=3))),
        said(lambda: get_strategy(StrategyConfig(shard_size=1, sp_size=2))),
        said(lambda: apply(copies, b)),
        said(three_heads),
        said(lambda: st.all_reduce(1, "median")),
        said(lambda: fork(state)),
        said(lambda: st.grad(tree.replace(state, params=copies), apply, conformance.loss_fn, [b])),
        said(lambda: model.bind(tiny.llama())[0](state.params, b)),
        said(lambda: st.grad(state, lambda p, b: apply(p, b), conformance.loss_fn, [b])),
        said(lambda: st.grad(state, st.bind(tiny.llama())[0], conformance.loss_fn, [b])),
    ]


def stale(rank):
    """Scores between gradient and update, and after it: the second are of the new weights."""
    st = get_strategy(StrategyConfig())
    lm = tiny.llama(dtype=torch.float64)
    apply, state = st.init(lm, conformance.adamw())
    packs = st.shard(conformance.experience(0), 40)
    grads, _ = st.grad(state, apply, conformance.loss_fn, packs)
    before = model.score(apply, state.params, packs)
    state, _ = st.update(state, grads)
    after = model.score(apply, state.params, packs)
    whole = tiny.llama(dtype=torch.float64)
    whole.load_state_dict(dict(st.export(state)), strict=False)
    want = model.score(*model.bind(whole), packs)
    return [float((a - b).abs().max()) for a, b in ((after[0], want[0]), (before[0], want[0]))]


def everything(rank):
    return refusals(rank), stale(rank)


@pytest.fixture(scope="module")
def two():
    return ranks.run(2, "test_fsdp2:everything")


def test_what_does_not_fit_is_refused_on_every_rank(two):
    want = [
        "sp_size: expected a divisor of the 2 processes, got 3",
        "shard_size: expected a divisor of the 2 processes and a multiple of sp_size 1, got 3",
        "shard_size: expected a divisor of the 2 processes and a multiple of sp_size 2, got 1",
        "params: expected this module's own, got others: sharded, it takes no others; apply, params "
        "= st.bind(another module), then model.assign(params, source) puts them there",
        "sp_size: expected a divisor of the 3 attention heads, got 2",
        "op: expected sum, mean, max, min, got 'median'",
        "state: expected one of the local strategy, got one of a module that FSDP2 or ZeRO lays out; st.init "
        "a second module and give it these weights: model.assign(its.params, st.export(state))",
        "params: expected model.embed_tokens.weight to be a parameter that requires a gradient, got a copy "
        "or a frozen one, which never learns; st.init a second module and model.assign(its.params, "
        "st.export(state))",
        "params: expected plain tensors, got model.embed_tokens.weight in the shards of FSDP2; score them "
        "with the apply of their own st.init, or model.assign(params, st.export(state)) here",
        *ANOTHER_APPLY,
    ]
    assert [found for found, _ in two] == [want, want]


def test_a_forward_without_backward_leaves_no_old_weights(two):
    for _, (gap, moved) in two:
        assert gap < 1e-12 and moved > 1e-4
