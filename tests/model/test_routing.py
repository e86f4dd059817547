"""Experts as data: recorded by the sampler, replayed in the trainer, with the gradient of dense logits."""

import copy

import floor
import pytest
import ref
import tiny
import torch
from test_probe import quiet, rows
from test_router import EXP, KINDS, close, routed, small

import rft_fn as rft
from rft_fn import engine, model, optim, packing, rng, tree
from rft_fn.engine import requests
from rft_fn.model import mlp_slices, router, routing
from rft_fn.model.bounds import find_prefixes
from rft_fn.model.packing_probe import usual_tokens
from rft_fn.strategy import StrategyConfig, get_fake_strategy

GROUPED = KINDS["DeepseekV3"] | {
    "n_group": 4,
    "topk_method": "group_limited_greedy",
    "first_k_dense_replace": 0,
}
EXACT = ("GptOss", "Lfm2Moe", "Mixtral", "Qwen3Moe", "DeepseekV3", "GraniteMoe")


def tried(lm):
    return routing.require_replay(lm, usual_tokens(lm.config)[:8])


@pytest.mark.parametrize("kind", KINDS)
def test_routers_of_every_rule_take_a_choice(kind):
    floor.require(f"{kind} routers")
    lm = small(kind)
    plain = lm(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
    like = tried(lm)
    count = len(routing.Recorder(lm).routers)
    assert like.shape == (0, count, 2) and like.dtype == torch.uint8
    assert torch.equal(lm(input_ids=torch.tensor([[3, 4, 5, 6]])).logits, plain)


def test_more_experts_than_8_bits_count_have_16():
    lm = small("Qwen3Moe", num_experts=256)
    assert tried(lm).dtype == torch.int16
    assert tried(small("Qwen3Moe", num_experts=255)).dtype == torch.uint8


REFUSED = [
    ("Llama", {}, "replay_routing: expected False for LlamaForCausalLM, which has no routers of experts"),
    ("Phimoe", KINDS["Mixtral"], "replay_routing: expected .*PhimoeTopKRouter"),
    (
        "Llama4Text",
        {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 64},
        "replay_routing: expected False for Llama4ForCausalLM, whose routers give no logits and choices",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED)
def test_what_cannot_replay_is_refused_by_name(kind, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        quiet(engine.hf, small(kind, **changes), tiny.tokenizer(), routing=True)
    assert "\n" not in str(caught.value)


def test_only_an_engine_that_tells_may_be_asked():
    with pytest.raises(ValueError, match=r"replay_routing: expected engine_type hf, .* got vllm"):
        engine.check_config(engine.config_of(StrategyConfig(engine_type="vllm", replay_routing=True)))


# ---------- the gradient


@pytest.mark.parametrize("kind", ["DeepseekV2", "DeepseekV3"])
def test_experts_of_groups_that_are_left_out_now_have_a_gradient(kind):
    """Of four groups a router takes one; the experts that are given are in others."""
    floor.require(f"{kind} routers")
    lm = small(kind, torch.float64, **GROUPED)
    routing.follow(lm)
    gate = next(iter(routing.Recorder(lm).routers.values()))
    x = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, _, own = gate(x)
    given = (own + 4) % 8
    with routing.replayed((given[:, None] + 1).to(torch.uint8)):
        _, weights, chosen = gate(x)
    assert torch.equal(chosen, given) and bool((weights > 0).all())
    weights.pow(2).sum().backward()
    reached = gate.weight.grad.abs().amax(-1) > 0
    assert set(given.unique().tolist()) <= set(reached.nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("kind", "way", "tolerance"),
    [("Lfm2Moe", "sigmoid", 1e-6), ("Qwen3Moe", "softmax", 1e-6), ("DeepseekV3", "sigmoid", 1e-6)],
)
def test_the_gradient_is_that_of_the_definition(kind, way, tolerance):
    """Of router, experts and states, along random directions; by differences of the definition in numpy."""
    floor.require(f"{kind} routers")
    more = {"DeepseekV3": {"first_k_dense_replace": 0}, "Qwen3Moe": {"norm_topk_prob": True}}.get(kind, {})
    lm = small(kind, torch.float64, **more)
    router.without_groups(lm)
    routing.follow(lm)
    name, gate = next(iter(routing.Recorder(lm).routers.items()))
    block = lm.get_submodule(name.rpartition(".")[0])
    experts = block.experts
    g = torch.Generator().manual_seed(1)
    x = torch.randn(6, 32, dtype=torch.float64, generator=g)
    count = gate.weight.shape[0]
    chosen = torch.stack([torch.randperm(count, generator=g)[:2] for _ in range(6)])
    parts = [x, gate.weight.data, *experts.gate_up_proj.data.chunk(2, 1), experts.down_proj.data]
    along = [torch.randn(p.shape, generator=g, dtype=torch.float64) for p in parts]
    out_of = torch.randn(6, 32, generator=g, dtype=torch.float64)
    scale = getattr(gate, "routed_scaling_factor", 1.0)

    def value(step):
        moved = [(p.detach() + s * d).numpy() for p, d, s in zip(parts, along, step)]
        return scale * (ref.mixture(*moved, chosen.numpy(), way) * out_of.numpy()).sum()

    given = (chosen[:, None] + 1).to(torch.uint8)
    x.requires_grad_()
    with routing.replayed(given):
        _, weights, found = gate(x) if kind != "Lfm2Moe" else gate(x, block.expert_bias)
        y = experts(x, found, weights)
    (y * out_of).sum().backward()
    grads = [x.grad, gate.weight.grad, *experts.gate_up_proj.grad.chunk(2, 1), experts.down_proj.grad]
    assert (y * out_of).sum().item() == pytest.approx(value([0] * 5), rel=tolerance)
    for i, (grad, direction) in enumerate(zip(grads, along)):
        step = [1e-5 * (i == j) for j in range(5)]
        want = (value(step) - value([-s for s in step])) / 2e-5
        size = float(grad.norm() * direction.norm())
        assert abs((grad * direction).sum().item() - want) < 10 * tolerance * size, i


# ---------- the sampler's choice


@pytest.fixture
def responses(monkeypatch):
    """What the sampler gave to `assemble`: log-probs of rollouts are rounded to float32."""
    seen = []
    plain = requests.assemble

    def assemble(prompts, found, **options):
        seen[:] = found
        return plain(prompts, found, **options)

    monkeypatch.setattr(requests, "assemble", assemble)
    return seen


PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16]]
KEYS = [rng.fold_in(0, i) for i in range(len(PROMPTS))]


def sampled(lm, *, batch=4, n=3, max_new=9):
    eng = quiet(engine.hf, lm, tiny.tokenizer(), batch=batch, routing=True)
    return quiet(eng.generate, PROMPTS, KEYS, n=n, sampling=rft.Sampling(max_new=max_new))


def trained(lm, **options):
    st = get_fake_strategy()
    return (st, *quiet(st.bind, lm, **options))


def wide_logp(found, rollout):
    out = torch.zeros(rollout.logp.shape, dtype=torch.float64)
    for row, mask, x in zip(out, rollout.mask, found):
        row[mask] = torch.tensor(x.logp, dtype=torch.float64)
    return out


@pytest.mark.parametrize("kind", EXACT)
def test_the_trainer_by_the_samplers_experts_is_the_sampler(kind, responses):
    """To rounding in float64: rows join and leave, prompts are shared; packs share prompts too.

    DeepSeek's routers compute in float32.
    """
    floor.require(f"{kind} routers")
    lm = small(kind, torch.float64)
    rollout = sampled(copy.deepcopy(lm))
    assert rollout.routing.shape[:2] == rollout.tokens.shape
    position = torch.arange(rollout.tokens.shape[1])
    read = position < rollout.length[:, None] - 1
    assert bool((rollout.routing > 0).flatten(2).all(-1).eq(read).all())
    st, apply, params = trained(lm)
    got = st.score(apply, params, rollout, 40).logp
    want = wide_logp(responses, rollout)
    assert float(((got - want) * rollout.mask).abs().max()) < (1e-6 if kind == "DeepseekV3" else 1e-12)


def test_moved_experts_widen_the_gap_only_where_they_are_not_replayed():
    """Noise on the trainer's routers flips choices; with the sampler's the rest of the model is unmoved."""
    lm = small("Qwen3Moe", torch.float64)
    rollout = sampled(copy.deepcopy(lm), n=8)
    g = torch.Generator().manual_seed(3)
    for gate in routing.Recorder(lm).routers.values():
        gate.weight.data += 0.003 * torch.randn(gate.weight.shape, generator=g, dtype=torch.float64)
    st, apply, params = trained(lm)
    gaps = {}
    for name, x in {"with": rollout, "without": tree.replace(rollout, routing=None)}.items():
        gap = (st.score(apply, params, x, 60).logp - rollout.logp) * rollout.mask
        gaps[name] = float(gap.abs().sum() / rollout.mask.sum()), float(gap.abs().max())
    assert gaps["without"][0] > 1.4 * gaps["with"][0] and gaps["without"][1] > 2 * gaps["with"][1], gaps


def test_a_row_that_is_continued_keeps_what_it_had():
    """Cut and continued, rows have the routing of rows that were sampled at once."""
    lm = small("Qwen3Moe", torch.float64)
    eng = quiet(engine.hf, copy.deepcopy(lm), tiny.tokenizer(), batch=4, routing=True)
    whole = quiet(eng.generate, PROMPTS, KEYS, n=1, sampling=rft.Sampling(max_new=9))
    short = eng.generate(PROMPTS, KEYS, n=1, sampling=rft.Sampling(max_new=9), max_new=[4] * 3)
    more = eng.generate(
        rft.rollout.prefixes(short),
        [(k, 0) for k in KEYS],
        n=1,
        sampling=rft.Sampling(max_new=9),
        max_new=[5] * 3,
        start=short.mask.sum(-1).tolist(),
    )
    joined = rft.rollout.extend(short, more)
    assert torch.equal(joined.tokens, whole.tokens) and torch.equal(joined.routing, whole.routing)
    assert len(eng.generate([], [], sampling=rft.Sampling()).routing) == 0


# ---------- cuts of a batch


def gradients(lm, packs, **options):
    st = get_fake_strategy()
    apply, state = quiet(st.init, lm, optim.adamw(0.0), **options)
    grads, _ = st.grad(state, apply, lambda out, b: rft.loss.nll(out.logp), packs)
    return dict(grads.items())


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss"])
def test_a_gradient_is_the_same_in_any_cut_and_when_it_is_computed_again(kind, monkeypatch):
    """One pack, packs of a row, padding behind, and checkpointing; by other experts than the model's."""
    monkeypatch.setattr(mlp_slices, "SLICE", 10)  # a router is told the experts of a whole pack
    floor.require(f"{kind} routers")
    exp = routed(EXP)
    cuts = ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2, 0], [3, 1]])
    packed = [[packing.pack(exp, rows) for rows in cut] for cut in cuts]
    packed.append([packing.pad(b, 40) for b in packed[0]])
    want = gradients(small(kind), packed[0])
    for packs in packed[1:]:
        close(gradients(small(kind), packs), want, 1e-4)
    for kept in (True, "slices"):
        close(gradients(model.load(small(kind), gradient_checkpointing=kept), packed[0]), want, 1e-5)
    if kind == "GptOss":  # what it keeps of a product it writes into
        with pytest.raises(ValueError, match="gradient_checkpointing: expected a model that leaves"):
            gradients(model.load(small(kind), gradient_checkpointing="products"), packed[0])
    free = gradients(small(kind), [tree.replace(packed[0][0], routing=None)])
    assert any(float((free[n] - g).abs().max()) > 1e-3 for n, g in want.items())


def test_prompts_are_computed_once_where_their_experts_are_the_same():
    """Four responses to a prompt: all alike, or one that other weights have sampled."""
    exp = rows([(9, 3)] * 4, seed=1)
    tokens = exp.tokens.clone()
    tokens[:, :9] = tokens[0, :9]
    g = torch.Generator().manual_seed(0)
    drawn = torch.rand(*tokens.shape, 2, 4, generator=g).argsort(-1)[..., :2] + 1
    drawn[:, :9] = drawn[0, :9]
    other = drawn.clone()
    other[3, 2] = other[3, 2].flip(-1)
    want = {}
    for name, given, own in (("alike", drawn, 17), ("one apart", other, 24)):
        batch = tree.replace(exp, tokens=tokens, routing=given.to(torch.uint8))
        pack = packing.pack(batch, [0, 1, 2, 3])
        found = find_prefixes(pack.tokens, pack.pos, [11] * 4, pack.routing)
        assert len(found.kept) == own, name
        for share in (True, False):
            apply, params = quiet(model.bind, small("Qwen3Moe"), share_prefixes=share)
            want[name, share] = apply(params, pack).logp
        torch.testing.assert_close(want[name, True], want[name, False], rtol=0, atol=1e-5)


def test_a_routing_of_another_model_is_refused():
    apply, params = quiet(model.bind, small("Qwen3Moe"))
    pack = packing.pack(routed(EXP, routers=3), [0])
    with pytest.raises(ValueError, match=r"routing: expected \[T, 2, k\] for the 2 routers of Qwen3MoeFor"):
        apply(params, pack)
    apply, params = quiet(model.bind, small("Llama"))
    with pytest.raises(ValueError, match=r"routing: expected \[T, 0, k\] for the 0 routers of LlamaFor"):
        apply(params, pack)
