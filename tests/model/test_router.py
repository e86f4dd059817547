"""The balance of experts: its definition, models with routers, cuts of a batch, two processes."""

import copy
import math

import floor
import numpy as np
import pytest
import ref
import tiny
import torch
from families import DELTA, EXPERTS, USUAL
from ranks import run
from test_house import load_script as script
from test_probe import quiet, rows
from test_straight_line import logged, mixture
from tiny import mixed

import rft_fn as rft
from rft_fn import metric, model, optim, packing, tree
from rft_fn.model import router
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

DEEPSEEK = USUAL | {
    "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
SOME = USUAL | {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS = {
    "Qwen2Moe": USUAL | EXPERTS,
    "Qwen3Moe": USUAL | EXPERTS | {"head_dim": 8},
    "Olmoe": USUAL | {"num_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": SOME,
    "GraniteMoe": SOME,
    "GptOss": SOME | {"head_dim": 8, "sliding_window": 64},
    "DeepseekV3": DEEPSEEK,
    "Glm4Moe": DEEPSEEK | {"head_dim": 8},
    "Lfm2Moe": USUAL | EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Qwen3Next": USUAL | DELTA | EXPERTS | {"head_dim": 8},
    "Ernie4_5_Moe": USUAL | {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1
    },
    "Jamba": USUAL | {
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "use_mamba_kernels": False,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0,
    },
}  # fmt: skip
SIGMOID = ("DeepseekV3", "Glm4Moe", "Lfm2Moe")
SIZES = [(2, 5), (3, 7), (1, 4), (2, 2)]
EXP = rows(SIZES)


def routed(exp, routers=2, experts=4):
    """The batch with experts that are drawn, so that no router would choose them."""
    g = torch.Generator().manual_seed(5)
    shape = (*exp.tokens.shape, routers)
    drawn = torch.rand(*shape, experts, generator=g).argsort(-1)[..., :2] + 1
    read = torch.arange(exp.tokens.shape[1]) < exp.length[:, None] - 1
    return tree.replace(exp, routing=(drawn * read[..., None, None]).to(torch.uint8))


def small(kind, dtype=torch.float32, std=0.3, **changes):
    import transformers

    config = getattr(transformers, f"{kind}Config")(**KINDS.get(kind, USUAL) | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = transformers.AutoModelForCausalLM.from_config(config)
        for p in lm.parameters():
            if std and p.dim() >= 2:
                p.data.normal_(0, std)
    return lm.to(dtype).eval()


def outputs(lm, tokens):
    """(logits [n, E], chosen [n, k]) of each router for one sequence alone."""
    found = []
    classes = tuple({type(m) for m in router.Balance(lm).routers.values()})
    parts = [m for m in lm.modules() if isinstance(m, classes)]
    handles = [m.register_forward_hook(lambda _, __, out: found.append((out[0], out[2]))) for m in parts]
    lm(input_ids=tokens[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return [(x.detach().double().reshape(-1, x.shape[-1]).numpy(), i.numpy()) for x, i in found]


def defined(kind, lm):
    """(aux [B, S], share [B, S]) of the rows of EXP, each alone."""
    out = np.zeros((2, *EXP.tokens.shape))
    for i, n in enumerate(EXP.length.tolist()):
        parts = []
        for logits, chosen in outputs(lm, EXP.tokens[i, : n - 1]):
            score = 1 / (1 + np.exp(-logits)) if kind in SIGMOID else np.exp(logits)
            p = score / score.sum(-1, keepdims=True)
            parts.append(ref.expert_balance(p, chosen.reshape(n - 1, -1), [0] * (n - 1)))
        aux, share = zip(*parts)
        out[0, i, 1:n], out[1, i, 1:n] = np.mean(aux, 0), np.max(share, 0)
    return [torch.where(EXP.mask, torch.from_numpy(x), 0) for x in out]


@pytest.mark.parametrize("kind", KINDS)
def test_the_balance_is_that_of_each_row_alone(kind):
    """In packs, or one sequence after the other where a model mixes them."""
    floor.require(f"{kind} routers")
    lm, st = small(kind), get_fake_strategy()
    plain = copy.deepcopy(lm)
    apply, params = quiet(st.bind, lm, aux=True)
    packs = st.shard(EXP, 1000)
    outs = [apply(params, b) for b in packs]
    aux, share = defined(kind, plain)
    like = torch.zeros(EXP.tokens.shape)
    got = packing.unpack([x.aux for x in outs], packs, like)
    torch.testing.assert_close(got.double(), aux, rtol=0, atol=1e-5)
    got = packing.unpack([x.expert_share for x in outs], packs, like)
    torch.testing.assert_close(got.double(), share, rtol=0, atol=1e-6)
    assert aux[EXP.mask].unique().numel() > 1


def test_experts_in_float64_are_those_of_float32():
    """torch's product of groups, which transformers takes by default, knows no float64."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**KINDS["Qwen3Moe"])
    torch.manual_seed(0)
    narrow = Qwen3MoeForCausalLM(config).eval()
    wide = Qwen3MoeForCausalLM(copy.deepcopy(config)).eval().double()
    wide.load_state_dict(narrow.state_dict())
    assert narrow.config._experts_implementation == wide.config._experts_implementation == "grouped_mm"
    st, found = get_fake_strategy(), []
    for lm in (narrow, wide):
        apply, params = quiet(st.bind, lm, aux=True)
        found.append(st.score(apply, params, rows([(3, 5), (4, 2)]), 1000, fields=("aux",)))
        eng = rft.engine.hf(lm, tiny.tokenizer())
        found.append(eng.generate([[3, 4, 5]], [1], n=2, sampling=rft.Sampling(max_new=4)))
    torch.testing.assert_close(found[2].logp, found[0].logp.double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(found[2].aux, found[0].aux.double(), rtol=0, atol=1e-5)
    assert torch.equal(found[1].tokens, found[3].tokens)
    assert narrow.config._experts_implementation == "grouped_mm"


def test_even_use_is_one_and_one_expert_for_all_is_e_over_k():
    seq = torch.zeros(4, dtype=torch.long)
    even = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    real = torch.ones(4, dtype=torch.bool)
    p = torch.rand(4, 4).softmax(-1)
    aux, share = router.balance(p, even, seq, real, 1)
    torch.testing.assert_close(aux, torch.ones(4))
    torch.testing.assert_close(share, torch.full((4,), 0.25))
    one = torch.nn.functional.one_hot(torch.ones(4, dtype=torch.long), 4).float()
    aux, share = router.balance(one, torch.ones(4, 1, dtype=torch.long), seq, real, 1)
    torch.testing.assert_close(aux, torch.full((4,), 4.0))
    torch.testing.assert_close(share, torch.ones(4))


def drawn(seed=0):
    """Logits [T, E], choices [T, k] and sequences [T] of 18 tokens, in float64."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(18, 5, generator=g, dtype=torch.float64)
    seq = torch.repeat_interleave(torch.arange(4), torch.tensor([6, 1, 8, 3]))
    return logits, logits.topk(2).indices, seq


def test_a_cut_between_sequences_changes_nothing():
    logits, chosen, seq = drawn()
    real = torch.ones(18, dtype=torch.bool)
    whole, _ = router.balance(logits.softmax(-1), chosen, seq, real, 4)
    want, _ = ref.expert_balance(logits.softmax(-1).numpy(), chosen.tolist(), seq.tolist())
    np.testing.assert_allclose(whole, want, rtol=0, atol=1e-12)
    for at in (6, 7, 15):
        front, back = slice(0, at), slice(at, None)
        cut = [router.balance(logits[i].softmax(-1), chosen[i], seq[i], real[i], 4)[0] for i in (front, back)]
        torch.testing.assert_close(torch.cat(cut), whole, rtol=0, atol=1e-12)


def test_only_probabilities_have_a_gradient():
    logits, chosen, seq = drawn()
    real = torch.ones(18, dtype=torch.bool)

    def total(x):
        return mixed(router.balance(x.softmax(-1), chosen, seq, real, 4)[0])

    assert torch.autograd.gradcheck(total, (logits.requires_grad_(),), atol=1e-8)


def gradients(lm, packs, **options):
    """The gradient of a loss of log-probs and balance, summed over packs."""
    st = get_fake_strategy()
    tx = optim.adamw(0.0)
    apply, state = quiet(st.init, lm, tx, aux=True, **options)
    grads, values = st.grad(state, apply, loss_fn, packs)
    return dict(grads.items()), metric.results(values)


def loss_fn(out, b):
    return rft.loss.nll(out.logp) + 0.5 * out.aux, metric.router(out, b)


def close(got, want, tolerance):
    assert got.keys() == want.keys()
    for name, g in want.items():
        far = float((got[name] - g).abs().max()) / (float(g.abs().max()) + 1e-3)
        assert far < tolerance, (name, far)


@pytest.mark.parametrize("kind", ["Qwen3Moe", "DeepseekV3"])
def test_a_gradient_is_the_same_however_the_batch_is_cut(kind):
    """One pack, one pack a row, and with padding behind, which no router's share counts."""
    floor.require(f"{kind} routers")
    cuts = ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2, 0], [3, 1]])
    packed = [[packing.pack(EXP, rows) for rows in cut] for cut in cuts]
    packed.append([packing.pad(b, 40) for b in packed[0]])
    found = [gradients(small(kind), packs) for packs in packed]
    for grads, values in found[1:]:
        close(grads, found[0][0], 1e-4)
        for name in ("router/aux", "router/max_share", "loss"):
            assert values[name] == pytest.approx(found[0][1][name], abs=1e-6), name


def test_a_gradient_reaches_routers_and_what_is_before_them():
    lm = small("Qwen3Moe")
    st = get_fake_strategy()
    apply, state = st.init(lm, optim.adamw(0.0), aux=True)
    packs = st.shard(EXP, 1000)
    grads, _ = st.grad(state, apply, lambda out, b: out.aux, packs)
    reached = {name for name, g in grads.items() if g.abs().max() > 0}
    assert {f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)} <= reached
    assert "model.layers.0.mlp.experts.down_proj" in reached  # the second router reads what it gave
    assert not {"lm_head.weight", "model.norm.weight", "model.layers.1.mlp.experts.down_proj"} & reached


@pytest.mark.parametrize("kind", ["Mixtral", "DeepseekV3"])
def test_checkpointing_changes_no_gradient(kind):
    floor.require(f"{kind} routers")
    packs = [packing.pack(EXP, [0, 1, 2, 3])]
    plain, _ = gradients(small(kind), packs)
    checkpointed, _ = gradients(model.load(small(kind), gradient_checkpointing=True), packs)
    close(checkpointed, plain, 1e-6)


def test_a_copy_without_the_balance_is_left_alone():
    """Nobody listens outside of a forward, and a model without `aux` gives none."""
    lm = small("Qwen3Moe")
    model.bind(lm, aux=True)
    assert not any(m._forward_hooks for m in lm.modules())
    apply, params = model.bind(lm)
    out = apply(params, packing.pack(EXP, [0]))
    assert out.aux is None and out.expert_share is None


def unlike(lm):
    """Routers with weights that are no probabilities of their logits."""
    for m in router.Balance(lm).routers.values():
        m.register_forward_hook(lambda _, __, out: (out[0], out[1] ** 3 + 0.1, out[2]))
    return lm


REFUSED = [
    (lambda: small("Llama"), r"aux: expected False for LlamaForCausalLM, which has no routers of experts"),
    (
        lambda: small(
            "Llama4Text", num_local_experts=4, head_dim=8, intermediate_size_mlp=48, attention_chunk_size=64
        ),
        "aux: expected False for Llama4ForCausalLM, whose routers give no logits and choices",
    ),
    (lambda: model.load_critic(small("Qwen3Moe", **{})), "aux: expected False for Critic"),
    (lambda: unlike(small("Qwen3Moe")), "aux: expected routers of softmax or sigmoid .* leave router_aux"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_has_no_balance_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        quiet(model.bind, make(), aux=True)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_coefficient_changes_what_a_script_learns(name, tmp_path):
    """What is added to the policy's loss is the coefficient times the mean balance, a weight a token."""
    module, folder = script(name), mixture(tmp_path / "base")
    options = {"model": folder, "steps": 1, "prompts": 2, "group": 2, "eval_prompts": 1, "minibatches": 1}
    added = {}
    for coef in (0.0, 0.5):
        cfg = module.Config(**options, router_aux=coef, out=str(tmp_path / f"run{coef}"))
        module.main(cfg)
        row = logged(tmp_path / f"run{coef}")[0]
        added[coef] = row["loss"] - row["policy/loss"]
        assert ("router/aux" in row) == ("router/max_share" in row) == (coef > 0)
    assert abs(added[0.0]) < 1e-6
    assert added[0.5] == pytest.approx(0.5 * row["router/aux"], rel=0.1)


def test_the_coefficient_is_on_top_of_what_pairs_cost(tmp_path):
    """The loss of a pair is log 2 before the first update, whatever the model."""
    module, folder = script("dpo"), mixture(tmp_path / "base")
    options = {"model": folder, "steps": 1, "batch": 4, "eval_pairs": 2, "router_aux": 0.5}
    module.main(module.Config(**options, out=str(tmp_path / "run")))
    row = logged(tmp_path / "run")[0]
    assert row["loss"] - math.log(2) == pytest.approx(0.5 * row["router/aux"], rel=0.1)


# ---------------------------------------------------------------------------------- several processes

WAYS = {
    "fsdp2": StrategyConfig(fsdp=True),
    "checkpointed": StrategyConfig(fsdp=True),
    "sequence": StrategyConfig(sp_size=2),
    "zero3": StrategyConfig(zero_stage=3),
}


def on_ranks(rank):
    """The balance and weights after a step of plain gradient descent, by each backend; by experts too."""
    out = {}
    for name, config in WAYS.items():
        for exp in (EXP, routed(EXP)):
            st = get_strategy(config)
            lm = model.load(small("Qwen3Moe"), gradient_checkpointing=name == "checkpointed")
            out[name, exp.routing is not None] = step_of(st, lm, exp)
    return out


def step_of(st, lm, exp):
    apply, state = quiet(st.init, lm, optim.adamw(1e-2, eps=1.0), aux=True)
    grads, values = st.grad(state, apply, loss_fn, st.shard(exp, 12))
    state, more = st.update(state, grads)
    weights = {name: x.clone() for name, x in st.export(state)}
    return weights, metric.results(values | more)


def test_two_processes_are_as_one(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    alone = {exp.routing is not None: exp for exp in (EXP, routed(EXP))}
    alone = {given: step_of(get_fake_strategy(), small("Qwen3Moe"), exp) for given, exp in alone.items()}
    for rank in run(2, "test_router:on_ranks"):
        for name, (weights, values) in rank.items():
            want, wanted = alone[name[1]]
            for metric_name in ("router/aux", "router/max_share", "loss", "grad/norm"):
                assert values[metric_name] == pytest.approx(wanted[metric_name], rel=1e-5), (
                    name,
                    metric_name,
                )
            for n, x in want.items():
                assert float((weights[n] - x).abs().max()) < 2e-6, (name, n)
