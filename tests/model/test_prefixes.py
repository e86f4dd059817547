"""Tokens of a pack that begin alike are computed once, and nothing else changes."""

import dataclasses

import families
import pytest
import ref
import sees_and_hears
import tiny
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from torch.nn.functional import scaled_dot_product_attention

from rft_fn import loss, metric, model, optim, packing, tree
from rft_fn.loss.gradient import gradient
from rft_fn.model import attention, packed_attention, packing_probe
from rft_fn.model.bounds import COUNTS, SequenceBounds, find_prefixes, take_rows
from rft_fn.packing import supervised
from rft_fn.strategy import StrategyConfig, get_strategy

sequences = some.lists(some.lists(some.integers(0, 2), min_size=1, max_size=12), min_size=2, max_size=8)


def groups(prompts=2, group=4, read=12, longest=6, dtype=torch.float64):
    """Rows of several responses to each prompt, with advantages."""
    g = torch.Generator().manual_seed(0)

    def draw(n):
        return torch.randint(3, len(tiny.tokenizer()), (n,), generator=g).tolist()

    rows = []
    for _ in range(prompts):
        prompt = draw(read)
        rows += [(prompt, draw(1 + i % longest)) for i in range(group)]
    exp = supervised(rows)
    adv = torch.randn(exp.mask.shape, generator=g, dtype=torch.float64).to(dtype) * exp.mask
    return tree.replace(exp, old_logp=exp.old_logp.to(dtype), adv=adv, w=exp.mask.to(dtype))


def ppo(out, b):
    return loss.ppo_clip(out.logp, b.old_logp, b.adv), {}


@pytest.fixture
def computed(monkeypatch):
    """The number of tokens of each forward of a decoder."""
    from rft_fn.model import forward

    seen = []
    own = forward.text_inputs

    def inputs(*args, **kwargs):
        found = own(*args, **kwargs)
        seen.append(found["input_ids"].shape[1])
        return found

    monkeypatch.setattr(forward, "text_inputs", inputs)
    return seen


@pytest.fixture
def also_rounded(monkeypatch):
    """Models in float64 share tokens also where a layer rounds them to float32."""
    monkeypatch.setattr(packing_probe, "rounds", lambda *_: False)


def arrays(rows, padding=0):
    tokens = torch.tensor([x for row in rows for x in row] + [rows[-1][0]] * padding)
    pos = torch.cat([torch.arange(len(row)) for row in rows] + [torch.zeros(padding, dtype=torch.long)])
    sizes = [len(row) for row in rows]
    sizes[-1] += padding
    return tokens, pos, sizes


@given(rows=sequences, padding=some.integers(0, 3))
def test_tokens_share_a_state_exactly_where_they_begin_alike(rows, padding):
    tokens, pos, sizes = arrays(rows, padding)
    alike = ref.beginnings(tokens, pos, sizes)
    found = find_prefixes(tokens, pos, sizes)
    few = len(set(alike)) > 0.9 * len(alike)
    assert (found is None) == few
    if found is None:
        return
    kept, of = found.kept.tolist(), found.of.tolist()
    assert kept == sorted(set(kept)) and len(kept) == len(set(alike))
    assert [alike[kept[i]] for i in of] == alike
    assert all(of[t] == i for i, t in enumerate(kept))


def test_padding_behind_a_sequence_is_no_continuation_of_it():
    tokens, pos, sizes = arrays([[1, 1, 1, 1], [1, 1]], padding=2)
    found = find_prefixes(tokens, pos, sizes)
    assert found is not None and found.of.tolist()[:2] == found.of.tolist()[4:6]
    assert found.kept.tolist()[-2:] == [6, 7]


@given(rows=sequences, padding=some.integers(0, 2), sinks=some.booleans(), seed=some.integers(0, 99))
def test_kept_tokens_attend_as_all_tokens_do(rows, padding, sinks, seed):
    """Values and gradients of the tokens that are kept are those of attention over whole sequences."""
    tokens, pos, sizes = arrays(rows + rows[:2], padding)
    found = find_prefixes(tokens, pos, sizes)
    assume(found is not None)
    shared = SequenceBounds(sizes, prefixes=found)
    g = torch.Generator().manual_seed(seed)
    heads = (4, 2, 2)
    qkv = [torch.randn(len(found.kept), h, 8, generator=g, dtype=torch.float64) for h in heads]
    qkv = [x.requires_grad_() for x in qkv]
    sink = torch.randn(4, generator=g, dtype=torch.float64) if sinks else None
    got = packed_attention.packed(*qkv, shared, sinks=sink)
    whole = (x[found.of] for x in qkv)
    want = packed_attention.by_sequence(*whole, SequenceBounds(sizes), sinks=sink)[found.kept]
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    for a, b in zip(*(torch.autograd.grad(tiny.mixed(x), qkv) for x in (got, want))):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """The contract of torch 2.11's varlen_attn, in torch: fewer queries are the last, heads of q share."""
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    counts, sizes = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max_q, max_k) == (max(counts), max(sizes)) and min(counts) > 0
    out = []
    for q, k, v in zip(query.split(counts), key.split(sizes), value.split(sizes)):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        out.append(y.transpose(0, 1))
    return torch.cat(out)


@given(rows=sequences, padding=some.integers(0, 2), seed=some.integers(0, 99))
def test_one_kernel_for_the_pack_gets_the_kept_queries_and_whole_keys(rows, padding, seed):
    tokens, pos, sizes = arrays(rows + rows[:2], padding)
    found = find_prefixes(tokens, pos, sizes)
    assume(found is not None)
    shared = SequenceBounds(sizes, prefixes=found)
    g = torch.Generator().manual_seed(seed)
    qkv = [torch.randn(len(found.kept), h, 8, generator=g, dtype=torch.float64) for h in (4, 2, 2)]
    qkv = [x.requires_grad_() for x in qkv]
    got = packed_attention.by_varlen(varlen, *qkv, shared, scale=0.3)
    want = packed_attention.by_tail(*qkv, shared, scale=0.3)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    for a, b in zip(*(torch.autograd.grad(tiny.mixed(x), qkv) for x in (got, want))):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_one_kernel_for_the_pack_copies_neither_queries_nor_a_head_twice(monkeypatch):
    """Only keys and values of the beginnings are gathered, and their places once for all layers."""
    tokens, pos, sizes = arrays([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5]])
    shared = SequenceBounds(sizes, prefixes=find_prefixes(tokens, pos, sizes))
    qkv = [torch.randn(6, h, 8) for h in (4, 2, 2)]
    seen, taken = [], []
    take = packed_attention.take_rows
    monkeypatch.setattr(packed_attention, "take_rows", lambda *a: taken.append(a) or take(*a))
    monkeypatch.setattr(packed_attention, "choose", lambda *args: ("varlen", None))

    def kernel(query, key, value, *bounds, scale, window_size):
        seen.append((query, key, value, *bounds))
        return varlen(query, key, value, *bounds, scale=scale, window_size=window_size)

    monkeypatch.setattr(packed_attention, "_kernels", lambda: {"varlen": kernel})
    for _ in range(2):
        assert packed_attention.packed(*qkv, shared).shape == (6, 4, 8)
    assert [x.shape for x in seen[0][:3]] == [(6, 4, 8), (10, 2, 8), (10, 2, 8)]
    assert seen[0][0].data_ptr() == qkv[0].data_ptr()
    assert seen[0][3:5] == seen[1][3:5]  # the tensors of the first layer
    assert len(taken) == 4 and all(index is taken[0][1] for _, index in taken)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen3", "Mixtral", "DeepseekV3", "GPTNeoX"])
def test_log_probs_and_gradients_are_those_of_each_row_alone(kind, computed, also_rounded):
    lm = families.small(kind)
    exp = groups()
    (pack,) = packing.shard(exp, 500)[0]
    grads = []
    for share in (True, False):
        apply, params = model.bind(lm, entropy=True, share_prefixes=share)
        computed.clear()
        out = apply(params, pack)
        grads.append(torch.autograd.grad((out.logp * pack.adv + out.entropy).sum(), list(params.values())))
        assert computed == [len(set(ref.beginnings(pack.tokens, pack.pos, sizes(pack))))] or not share
        rows = packing.unpack([out.logp], [pack], exp.adv)
        torch.testing.assert_close(rows, tiny.definition(lm, exp), atol=2e-6, rtol=0)
    # norms of some families are in float32 whatever the model is in
    for a, b in zip(*grads):
        assert float((a - b).abs().max()) <= 1e-5 * max(float(b.abs().max()), 1e-3)


def sizes(pack):
    return torch.unique_consecutive(pack.seq, return_counts=True)[1].tolist()


def test_in_float64_throughout_the_gradient_is_the_same_to_thirteen_digits():
    """GPT-NeoX computes nothing in float32 by itself."""
    lm = families.small("GPTNeoX")
    pack = packing.shard(groups(), 500)[0][0]
    grads = []
    for share in (True, False):
        apply, params = model.bind(lm, share_prefixes=share)
        grads.append(torch.autograd.grad((apply(params, pack).logp * pack.adv).sum(), list(params.values())))
    most = max(float(b.abs().max()) for b in grads[1])
    assert max(float((a - b).abs().max()) for a, b in zip(*grads)) <= 1e-13 * most


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPT2", "Mixtral", "GPTNeoX"])
def test_in_float64_no_cut_changes_the_gradient(kind):
    """Norms of most families are in float32 whatever the model is in: no prompt is shared with them."""
    lm = families.small(kind)
    exp = groups()
    found = []
    for budget in (500, 60, 20):
        apply, params = model.bind(lm)
        total = [torch.zeros_like(p) for p in params.values()]
        for pack in packing.shard(exp, budget, share_prefixes=True)[0]:
            summed = (pack.w * ppo(apply(params, pack), pack)[0]).sum()
            each = torch.autograd.grad(summed, list(params.values()), allow_unused=True)
            total = [a if b is None else a + b for a, b in zip(total, each)]
        found.append(torch.cat([x.flatten() for x in total]))
    for got in found[1:]:
        assert float((got - found[0]).norm()) <= 1e-12 * float(found[0].norm())


def grown(seed, rows=7):
    """Rows that continue others at random places, in two groups; all that follows the first place is in mask
    in some of them, and only the new tokens in the others."""
    g = torch.Generator().manual_seed(seed)

    def number(n):
        return int(torch.randint(n, (1,), generator=g))

    ids, masks, group = [[3 + number(20) for _ in range(6)]], [[False] * 2 + [True] * 4], [0]
    for k in range(1, rows):
        of = number(k)
        at = number(len(ids[of])) + 1
        new = [3 + number(20) for _ in range(1 + number(9))]
        learned = masks[of][:at] if number(2) else [False] * at
        ids.append([*ids[of][:at], *new])
        masks.append([*learned, *[True] * len(new)])
        group.append(group[of] if number(4) else 1 - group[of])
    exp = packing.conversations(list(zip(ids, masks)))
    adv = torch.randn(exp.mask.shape, generator=g, dtype=torch.float64) * exp.mask
    old = -2.5 + 0.5 * torch.randn(exp.mask.shape, generator=g, dtype=torch.float64)
    return tree.replace(exp, old_logp=old * exp.mask, adv=adv, w=exp.w.double(), group=torch.tensor(group))


def watched_ppo(out, b):
    loss, _ = ppo(out, b)
    return loss, {"logp": metric.mean(out.logp, b.mask), "most": metric.max(-out.logp, b.mask)}


@settings(max_examples=12)
@given(seed=some.integers(0, 10**6), cut=some.sampled_from([(0, 1), (70, 1), (40, 2), (25, 3)]))
def test_a_tree_of_turns_has_the_gradient_and_metrics_of_its_rows_alone(seed, cut):
    """Of tokens that several rows learn, each with its own advantage and weight; for any cut into packs."""
    exp = grown(seed)
    lm = families.small("GPTNeoX")
    apply, params = model.bind(lm)
    assert apply.root.shared

    # each row by itself
    alone = [packing.pack(exp, [i]) for i in range(len(exp.length))]
    want, metrics = gradient(params, apply, watched_ppo, alone)
    by_definition = tiny.definition(lm, exp)[exp.mask]
    assert metric.results(metrics)["logp"] == pytest.approx(by_definition.mean().item(), rel=1e-12)

    budget, world = cut
    budget = budget and max(budget, int(exp.length.max()))  # a row that is longer fits in no pack
    before = dataclasses.replace(COUNTS)
    packs = [p for part in packing.shard(exp, budget, world, share_prefixes=True) for p in part]
    got, found = gradient(params, apply, watched_ppo, packs)
    scale = max(float(g.abs().max()) for g in want.values())
    assert max(float((got[name] - want[name]).abs().max()) for name in want) <= 1e-12 * scale
    for name, x in metric.results(metrics).items():
        assert metric.results(found)[name] == pytest.approx(x, rel=1e-12), name

    # what was computed is each beginning once in a pack, where that is a tenth less
    counts = [(len(p.tokens), len(set(ref.beginnings(p.tokens, p.pos, sizes(p))))) for p in packs]
    least = [few if len(p.rows) > 1 and few <= 0.9 * n else n for p, (n, few) in zip(packs, counts)]
    assert COUNTS.read - before.read == sum(n for n, _ in counts)
    assert COUNTS.computed - before.computed == sum(least)


def test_values_and_scores_are_those_of_each_row_alone(computed, also_rounded):
    exp = groups()
    pack = packing.shard(exp, 500)[0][0]
    made = {
        "value": lambda: model.Critic(tiny.llama(dtype=torch.float64)),
        "score": lambda: model.load_reward(tiny.llama(dtype=torch.float64), new=True, pool="attention"),
    }
    for field, make in made.items():
        found = []
        for share in (True, False):
            torch.manual_seed(0)
            module = make()
            for name, p in module.named_parameters():
                if not name.startswith("decoder."):
                    p.data.copy_(torch.linspace(-0.3, 0.5, p.numel()).view_as(p))
            apply, params = model.bind(module, share_prefixes=share)
            computed.clear()
            found.append(getattr(apply(params, pack), field))
            assert (computed[0] < len(pack.tokens)) == share
        torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)


def test_it_works_under_checkpointing_and_transforms_of_functions(also_rounded):
    exp = groups()
    pack = packing.shard(exp, 500)[0][0]
    lm = tiny.llama(dtype=torch.float64)
    apply, params = model.bind(lm)

    def total(params):
        return (apply(params, pack).logp * pack.adv).sum()

    want = torch.autograd.grad(total(params), list(params.values()))
    by_function = torch.func.grad(total)(params)
    for a, b in zip(by_function.values(), want):
        torch.testing.assert_close(a, b)

    lm.gradient_checkpointing_enable({"use_reentrant": False})
    apply, params = model.bind(lm.train())
    for a, b in zip(torch.autograd.grad(total(params), list(params.values())), want):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("Mistral", {"sliding_window": 8}),  # a window without a list of layers, or with one
        ("Gemma3Text", {}),
        ("Mamba", {}),  # mixes the sequences of a pack
        ("Bloom", {}),  # its positions are a mask
        ("Gemma2", {"layer_types": ["full_attention"] * 2}),  # caps its scores
        ("Granite", {}),  # scales its logits, which are computed whole
    ],
)
def test_models_that_need_all_tokens_get_them(kind, changes):
    """Masks of transformers depend on the places of tokens in a pack."""
    lm = families.small(kind, **changes)
    exp = groups()
    apply, params = model.bind(lm, fused=True)
    assert apply.root.shared is False
    if apply.root.mode == "one_sequence":
        return
    pack = packing.shard(exp, 500)[0][0]
    rows = packing.unpack([apply(params, pack).logp], [pack], exp.adv)
    torch.testing.assert_close(rows, tiny.definition(lm, exp), atol=2e-6, rtol=0)


def test_a_layer_that_asks_for_more_after_the_question_is_named(also_rounded):
    lm = tiny.llama(dtype=torch.float64)
    apply, params = model.bind(lm)
    assert apply.root.shared
    lm.model.layers[1].self_attn.is_causal = False
    pack = packing.shard(groups(), 500)[0][0]
    why = "share_prefixes: expected False for LlamaModel: it asks for attention that is not causal"
    with pytest.raises(ValueError, match=why):
        apply(params, pack)


def test_a_model_whose_states_differ_when_tokens_are_shared_gets_them_all(monkeypatch):

    def wrong(*args):
        found = find_prefixes(*args)
        return found and found._replace(of=found.of.clamp(max=3))

    monkeypatch.setattr(attention, "find_prefixes", wrong)
    assert model.bind(tiny.llama())[0].root.shared is False


def test_the_balance_of_experts_counts_every_token(also_rounded):
    lm = families.small("Mixtral")
    assert model.bind(lm, aux=True)[0].root.shared is False
    assert model.bind(lm)[0].root.shared is True


def test_models_that_see_get_all_tokens():
    module = sees_and_hears.FAMILIES["Qwen2VL"].build(torch.float64)
    assert model.bind(module)[0].root.shared is False


def test_windows_are_known_by_the_config():
    assert not attention.needs_all_tokens(families.small("Qwen2"))
    assert attention.needs_all_tokens(families.small("Mistral", sliding_window=8))
    assert attention.needs_all_tokens(families.small("Olmo3"))


def rows_of(packs):
    return [sorted(p.rows) for p in packs]


@given(
    seed=some.integers(0, 2**32),
    world=some.integers(1, 3),
    most=some.integers(0, 5),
    budget=some.integers(24, 80),
)
def test_rows_of_a_prompt_share_packs_and_no_limit_is_broken(seed, world, most, budget):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(4):
        prompt = torch.randint(3, 40, (int(torch.randint(1, 12, (1,), generator=g)),), generator=g).tolist()
        for _ in range(int(torch.randint(1, 5, (1,), generator=g))):
            rows.append((prompt, [1] * int(torch.randint(1, 9, (1,), generator=g))))
    exp = supervised([rows[i] for i in torch.randperm(len(rows), generator=g).tolist()])
    ranks = packing.shard(exp, budget, world, most=most, share_prefixes=True)
    usual = packing.shard(exp, budget, world, most=most)
    packs = [p for part in ranks for p in part]
    assert sorted(row for p in packs for row in p.rows) == list(range(len(rows)))
    assert all(len(p.tokens) <= budget and (not most or len(p.rows) <= most) for p in packs)
    assert len({len(part) for part in ranks}) == 1
    assert len(packs) <= 1.25 * sum(len(part) for part in usual)


def test_prompts_that_fit_are_whole_and_packs_have_equal_work():
    exp = groups(prompts=6, group=4, read=20, longest=1)
    scattered = packing.shard(exp, 180)[0]
    together = packing.shard(exp, 180, share_prefixes=True)[0]
    assert len(together) == len(scattered) == 3
    assert all(len({row // 4 for row in p.rows}) == 2 and len(p.rows) == 8 for p in together)
    assert any(len({row // 4 for row in p.rows}) > 2 for p in scattered)


def test_rows_without_a_prompt_are_packed_as_ever():
    exp = tree.replace(tiny.experience(0, 9), mask=torch.ones_like(tiny.experience(0, 9).mask))
    usual, shared = (packing.shard(exp, 40, share_prefixes=x)[0] for x in (False, True))
    assert rows_of(usual) == rows_of(shared)


def test_a_strategy_keeps_prompts_together_for_a_model_that_shares():
    exp = groups(prompts=6, group=4, read=20, longest=1, dtype=torch.float32)
    st = get_strategy()
    assert any(len({row // 4 for row in p.rows}) > 2 for p in st.shard(exp, 180))
    st.init(tiny.llama(), optim.adamw(1e-3))
    assert all(len({row // 4 for row in p.rows}) == 2 for p in st.shard(exp, 180))
    for off in ({"share_prefixes": False}, {"packing_samples": False, "micro_train_batch_size": 8}):
        st = get_strategy(dataclasses.replace(StrategyConfig(), **off))
        st.init(tiny.llama(), optim.adamw(1e-3))
        usual = packing.shard(exp, 0 if "packing_samples" in off else 180, most=8)[0]
        assert rows_of(st.shard(exp, 180)) == rows_of(usual)


def test_a_step_computes_the_tokens_of_a_prompt_once(computed):
    exp = groups(prompts=6, group=4, read=20, longest=1, dtype=torch.float32)
    st = get_strategy()
    apply, state = st.init(tiny.llama(), optim.adamw(1e-3))
    packs = st.shard(exp, 180)
    computed.clear()
    st.grad(state, apply, ppo, packs)
    # inputs: the prompt once, and no response of one token
    assert sum(computed) == 6 * 20 and sum(len(p.tokens) for p in packs) == 24 * 20


def test_gradients_of_rows_are_the_same_bits_on_several_threads():
    """Rows that many take are added up in one order, whatever threads do."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, 64, generator=g, requires_grad=True)
    index = torch.randint(0, 60, (40, 60), generator=g)
    of_rows = torch.randn(40, 60, 4, 64, generator=g)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert torch.equal(take_rows(x, index), x[index])
        found = [torch.autograd.grad(take_rows(x, index), x, of_rows)[0] for _ in range(20)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
