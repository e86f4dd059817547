"""What every backend has to do alike: each case trains or scores a small model and returns what came out.

`on_ranks` runs all cases of several backends in one group of processes; `local` gives what one process does.
A case gets (config, dtype) and returns {name: tensor or number}, the same on every rank.
"""

import dataclasses
import hashlib
import io
import tempfile
import traceback
from contextlib import contextmanager

import families
import sees_and_hears
import tiny
import torch
from torch import nn

import rft_fn as rft
from rft_fn import metric, model, optim, packing, tree
from rft_fn.strategy import StrategyConfig, get_strategy

BACKENDS = {  # name -> (processes, options, float type)
    "fsdp2 x2": (2, {}, torch.float64),
    "fsdp2 sp x2": (2, {"sp_size": 2}, torch.float64),
    "hsdp x2": (2, {"shard_size": 1}, torch.float64),
    "fsdp2 x4": (4, {}, torch.float64),
    "fsdp2 sp2 x4": (4, {"sp_size": 2}, torch.float64),
    "fsdp2 sp4 x4": (4, {"sp_size": 4}, torch.float64),
    "hsdp x4": (4, {"shard_size": 2}, torch.float64),
    "hsdp sp2 x4": (4, {"shard_size": 2, "sp_size": 2}, torch.float64),
    # its small tensors whole on every rank; test_deepspeed has every stage, and this one with all in shards
    "zero3 x2": (2, {"zero_stage": 3}, torch.float32),
}


def experience(step, rows=8, dtype=torch.float64):
    """Samples with advantages of groups of four, from a policy that is a little off."""
    exp, g = tiny.experience(step, rows), torch.Generator().manual_seed(100 + step)
    noise = lambda: torch.randn(exp.mask.shape, generator=g, dtype=torch.float64).to(dtype) * exp.mask  # noqa: E731
    reward = torch.rand(rows // 4, 4, generator=g, dtype=torch.float64).to(dtype)
    adv = rft.advantage.grpo(reward).view(-1, 1) * exp.mask
    w = rft.weight.token_mean(exp.mask).to(dtype)
    return tree.replace(exp, old_logp=-3 + 0.3 * noise(), adv=adv, w=w, ret=noise(), old_value=noise())


def loss_fn(out, b):
    return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv), {"logp": metric.mean(out.logp, b.mask)}


def adamw(max_norm=0.5):
    schedule = optim.warmup_linear(1e-2, 2, 5)
    return optim.chain(optim.clip_by_global_norm(max_norm), optim.adamw(schedule, weight_decay=0.1))


def train(st, lm, steps=3, *, tx=None, budgets=(40,), loss=loss_fn, dtype, experiences=experience, **options):
    """Weights by name and the metrics of each step."""
    apply, state = st.init(lm, tx or adamw(), **options)
    out = {}
    for i in range(steps):
        packs = st.shard(experiences(i, dtype=dtype), budgets[i % len(budgets)])
        grads, metrics = st.grad(state, apply, loss, packs)
        state, more = st.update(state, grads)
        out |= {f"{i} {name}": x for name, x in metric.results(metrics | more).items()}
    return {n: x.clone() for n, x in st.export(state)} | out, state, apply


def once(make):
    """`make(st, dtype)`, run once for all cases of one strategy."""
    made = {}

    def get(st, dtype):
        if st.session not in made:
            made.clear()  # of another strategy
            made[st.session] = make(st, dtype)
        return made[st.session]

    return get


@once
def plain(st, dtype):
    """(the module, what came out of its training, state, apply) of a small model."""
    lm = tiny.llama(dtype=dtype)
    return lm, *train(st, lm, dtype=dtype)


@once
def adapted(st, dtype):
    """The same of adapters on a frozen model, which start as no zeros."""
    torch.manual_seed(3)
    lm = model.apply_lora_configuration(tiny.llama(dtype=dtype), rank=2, alpha=4).to(dtype)
    for name, p in lm.named_parameters():
        if "lora_B" in name:
            p.data.copy_(torch.linspace(-0.2, 0.2, p.numel(), dtype=dtype).view_as(p))
    return lm, *train(st, lm, dtype=dtype)


@once
def averaged(st, dtype):
    """The state of a model with an average of the weights, its optimizer in host memory and back."""
    tx = optim.chain(adamw(), optim.ema(0.9))
    _, state, _ = train(st, tiny.llama(dtype=dtype), tx=tx, dtype=dtype)
    return st.reload(st.offload(state))


def grpo(st, dtype):
    """Clip active, tied embeddings, weight decay, a schedule."""
    return plain(st, dtype)[1]


def untied(st, dtype):
    """A head of its own, one key-value head for all queries."""
    lm = tiny.llama(1, dtype=dtype, tie_word_embeddings=False, num_key_value_heads=1)
    return train(st, lm, dtype=dtype, entropy=True)[0]


def budgets(st, dtype):
    """Packs of other sizes at every step; a pack a sequence; the strategy's own cut."""
    return train(st, tiny.llama(dtype=dtype), budgets=(24, 200, 33), dtype=dtype)[0]


def flat(st, dtype):
    """Rows with advantage 0 are dropped: half of them, then all but one, which is less than a rank each."""

    def some(i, dtype):
        exp = experience(i, dtype=dtype)
        adv = exp.adv * (torch.arange(8)[:, None] < (4 if i < 2 else 0))
        return packing.drop_flat(tree.replace(exp, adv=adv), lambda out, b: loss_fn(out, b)[0])

    return train(st, tiny.llama(dtype=dtype), experiences=some, dtype=dtype)[0]


def one_prompt(st, dtype):
    """Responses to the same prompts, whose tokens are computed once in each pack; norms are in float64.

    In the second step the rows are the turns of two episodes, each after all turns before it.
    """

    def grouped(i, dtype):
        exp = experience(i, dtype=dtype)
        rows = [exp.tokens[k, :n].tolist() for k, n in enumerate(exp.length.tolist())]
        of = [rows[0] * 2, rows[4] * 2]
        read = [of[k // 4][:12] for k in range(8)]
        if i == 1:
            before = [[x for row in rows[k - k % 4 : k] for x in row] for k in range(8)]
            read = [begun + turns[:24] for begun, turns in zip(read, before)]
        both = packing.supervised(list(zip(read, rows)))
        w = rft.weight.token_mean(both.mask).to(dtype)
        return tree.replace(
            both,
            w=w,
            old_logp=both.old_logp.to(dtype) - 3,
            adv=exp.adv[:, :1] + 0.5 * both.mask,
            group=torch.arange(8) // 4,
        )

    lm = families.small(
        "GPTNeoX", dtype, attention_bias=False
    )  # the gradient of keys' biases is all rounding
    out, _, apply = train(st, lm, budgets=(60, 200), experiences=grouped, dtype=dtype)
    root = getattr(apply, "root", None)
    assert root is None or root.shared == (st.config.sp_size == 1)
    return out


def checkpointing(st, dtype):
    """Layers that are computed again in the backward."""
    lm = tiny.llama(dtype=dtype)
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    return train(st, lm, dtype=dtype)[0]


def snapshot(st, dtype):
    """Weights that were exported before an update, which does not change them."""
    apply, state = st.init(tiny.llama(1, dtype=dtype), adamw())
    kept = dict(st.export(state))
    grads, _ = st.grad(state, apply, loss_fn, st.shard(experience(0, dtype=dtype), 40))
    state, _ = st.update(state, grads)
    return kept | {f"new {name}": x for name, x in st.export(state)}


def whole_logits(st, dtype):
    """The way over [T, V], with top_k in the distribution."""
    sampling = rft.Sampling(temperature=0.8, top_k=9)
    return train(st, tiny.llama(dtype=dtype), sampling=sampling, dtype=dtype)[0]


def lora(st, dtype):
    """Adapters on a frozen model."""
    return adapted(st, dtype)[1]


def ppo(st, dtype):
    """An actor and a critic, each with its optimizer: values are scored, two minibatches a rollout."""
    actor_of, actor = st.init(tiny.llama(dtype=dtype), adamw(), entropy=True)
    value_of, critic = st.init(model.Critic(tiny.llama(5, dtype=dtype)), adamw(1.0))
    out = {}
    for i in range(2):
        exp = experience(i, dtype=dtype)
        packs = st.shard(exp, 40)
        rows = lambda x: st.gather(packing.unpack(x, packs, exp.adv)[None]).sum(0)  # noqa: B023, E731
        value, logp = (
            rows(model.values(value_of, critic.params, packs)),
            rows(model.score(actor_of, actor.params, packs)),
        )
        out |= {f"{i} value": value, f"{i} logp": logp}
        adv = rft.advantage.whiten(exp.adv + 0.1 * value, exp.mask)
        exp = tree.replace(exp, old_logp=logp, old_value=value, adv=adv)
        for part in packing.minibatches(exp, 2, key=i):
            part = tree.replace(part, w=rft.weight.token_mean(part.mask).to(dtype))
            mine = st.shard(part, 40)
            grads, metrics = st.grad(critic, value_of, rft.algorithm.get_actor_critic("ppo").value_loss, mine)
            critic, more = st.update(critic, grads)
            grads, also = st.grad(actor, actor_of, loss_fn, mine)
            actor, last = st.update(actor, grads)
            out |= {f"{i} {n}": x for n, x in metric.results(metrics | more).items()}
            out |= {f"{i} actor {n}": x for n, x in metric.results(also | last).items()}
    out |= {f"critic {n}": x.clone() for n, x in st.export(critic)}
    return out | {n: x.clone() for n, x in st.export(actor)}


def pairs(st, dtype):
    """DPO with a term of the chosen side: pairs share a pack, some ranks have none, a frozen reference."""
    ref_of, ref = st.bind(tiny.llama(9, dtype=dtype))
    apply, state = st.init(tiny.llama(dtype=dtype), adamw())

    def loss(out, b):
        sides = *packing.sides(out.logp, b), *packing.sides(b.ref_logp, b)
        tokens, _ = packing.sides(b.mask.to(dtype), b)
        per_pair = rft.loss.dpo(*sides, beta=0.3) - 0.5 * sides[0] / tokens.clamp(min=1)
        return per_pair[b.seq // 2], metric.pairs("pairs", *sides, packing.real(b), beta=0.3)

    out = {}
    for i, (rows, budget) in enumerate(((8, 48), (6, 200), (2, 200))):
        exp = tiny.experience(i, rows)
        exp = tree.replace(exp, w=rft.weight.pair_mean(exp.mask).to(dtype), old_logp=exp.old_logp.to(dtype))
        packs = st.shard(exp, budget, unit=2)
        mine = packing.unpack(model.score(ref_of, ref, packs), packs, exp.old_logp)
        exp = tree.replace(exp, ref_logp=st.gather(mine[None]).sum(0))
        grads, metrics = st.grad(state, apply, loss, st.shard(exp, budget, unit=2))
        state, more = st.update(state, grads)
        out |= {f"{i} {name}": x for name, x in metric.results(metrics | more).items()}
    return {n: x.clone() for n, x in st.export(state)} | out


def reference(st, dtype):
    """A KL term to a frozen model, sharded over fewer processes than the policy, which is scored before each
    step."""
    ref, params = st.bind(tiny.llama(9, dtype=dtype), shard_size=st.config.sp_size)
    apply, state = st.init(tiny.llama(dtype=dtype), adamw())
    with_kl = lambda out, b: loss_fn(out, b)[0] + 0.1 * rft.loss.kl(out.logp, b.ref_logp)  # noqa: E731
    for i in range(2):
        packs = st.shard(experience(i, dtype=dtype), 40)
        packs = [tree.replace(p, ref_logp=x) for p, x in zip(packs, model.score(ref, params, packs))]
        state, _ = st.update(state, st.grad(state, apply, with_kl, packs)[0])
    return {n: x.clone() for n, x in st.export(state)}


def average(st, dtype):
    """An average of the weights in the optimizer's state, and the optimizer in host memory and back."""
    state = averaged(st, dtype)
    ema = tree.replace(state, params=optim.ema_params(state.opt))
    return {n: x.clone() for n, x in st.export(ema)}


def average_scores(st, dtype):
    """The average scores, in a second model that it was put into: a sharded one takes no other parameters."""
    apply, params = st.bind(tiny.llama(1, dtype=dtype))
    model.assign(params, optim.ema_params(averaged(st, dtype).opt))
    exp = experience(5, dtype=dtype)
    packs = st.shard(exp, 40)
    rows = packing.unpack(model.score(apply, params, packs), packs, exp.adv)
    return {"scores": st.gather(rows[None]).sum(0)}


def skipped(st, dtype):
    """A NaN in one row of the second batch: no rank updates, all count, and the third step goes on."""

    def spoilt(i, dtype):
        exp = experience(i, dtype=dtype)
        if i == 1:
            exp.adv[3] = exp.adv[3] * torch.nan
        return exp

    out, state, _ = train(st, tiny.llama(dtype=dtype), experiences=spoilt, dtype=dtype)
    assert out["1 grad/skipped"] == 1 and state.step == 3 and state.skipped == 0
    return {n: x for n, x in out.items() if not n.startswith("1 ")}


@contextmanager
def wide():
    """float64 stays what it is where a model computes in float32 by itself, as the towers of Qwen do.

    A gradient that is computed in parts would be rounded in parts.
    """
    single = torch.Tensor.float

    def float_or_wider(x, *args, **kwargs):
        if x.dtype == torch.float64:
            return x
        return single(x, *args, **kwargs)

    torch.Tensor.float = float_or_wider
    try:
        yield
    finally:
        torch.Tensor.float = single


@wide()
def media(st, dtype, family):
    """Weights, metrics and scores of a model that sees or hears. Each rank brings its share of the rows, so
    some ranks have text alone; packs of one sequence, two packs a rank, an empty pack, a batch of text."""
    family = sees_and_hears.FAMILIES[family]
    one, two, text = family.kinds[:1], family.kinds[:1] * 2, []
    batches = (
        [one, text, two, one, text, text, text, text],
        [text, text, text, one, text, text, text, text],
        [one, two, one, one, one, two, one, one],
        [text] * 8,
    )
    apply, state = st.init(family.build(dtype), optim.adamw(1e-2, eps=1e-2, weight_decay=0.1))
    out = {}
    for i, rows in enumerate(batches):
        exp = share(st, sees_and_hears.batch(family, rows, seed=i))
        exp = tree.replace(exp, old_logp=exp.old_logp.to(dtype), adv=exp.adv.to(dtype), w=exp.w.to(dtype))
        budget = int(exp.length.max())
        out[f"{i} scores"] = st.score(apply, state.params, exp, budget).logp
        if i == 2:
            exp = packing.take(exp, torch.arange(1))  # the other ranks have an empty pack
        packs = st.shard(exp, budget)
        assert len(packs) > 1 or i > 0 or st.world > 2
        grads, metrics = st.grad(state, apply, loss_fn, packs)
        state, more = st.update(state, grads)
        out |= {f"{i} {name}": x for name, x in metric.results(metrics | more).items()}
    return out | {n: x.clone() for n, x in st.export(state)}


def share(st, exp):
    """A batch of which this rank brought only its own rows: what it has after the gather."""
    mine = torch.arange(len(exp.tokens)).tensor_split(st.world)[st.rank]
    return st.gather(packing.take(exp, mine))


def images(st, dtype):
    """Three-axis positions; with sequence parallelism towers run on the whole pack."""
    return media(st, dtype, "Qwen2VL")


def deepstack(st, dtype):
    """Features of the tower inside of the text model too."""
    return media(st, dtype, "Qwen3VL")


def audio(st, dtype):
    """A model that takes a mask; it cannot share the tokens of a pack, and says so."""
    if st.config.sp_size > 1:
        try:
            media(st, dtype, "Qwen2Audio")
        except ValueError as error:
            assert "sp_size: expected 1 for Qwen2AudioForConditionalGeneration" in str(error)
            st = get_strategy(StrategyConfig(fsdp=True))
    return media(st, dtype, "Qwen2Audio")


def reward_model(st, rm, batches, dtype, tx):
    """Scores before each of three steps on pairs, by two heads with a loss of their own, and the weights."""
    with torch.no_grad():
        for name, p in rm.named_parameters():
            if not name.startswith("decoder."):
                p.copy_(torch.linspace(-0.3, 0.5, p.numel(), dtype=torch.float64).view_as(p))
    apply, state = st.init(rm, tx)

    def loss(out, b):
        pairs = rft.loss.bradley_terry(*packing.sides(out.score[:, 0], b), margin=0.1)
        return pairs[b.seq // 2] + 0.1 * (out.score[:, 1] - b.pos % 3) ** 2

    out = {}
    for i, exp in enumerate(batches):
        budget = int(exp.length.max()) * (2 + i)
        scored = st.score(apply, state.params, exp, budget, fields=("score",)).score
        out[f"{i} scores"] = model.final_scores(scored, exp.mask)
        exp = tree.replace(exp, w=rft.weight.pair_mean(exp.mask).to(dtype), old_logp=exp.old_logp.to(dtype))
        grads, metrics = st.grad(state, apply, loss, st.shard(exp, budget, unit=2))
        state, more = st.update(state, grads)
        out |= {f"{i} {name}": x for name, x in metric.results(metrics | more).items()}
    return out | {n: x.clone() for n, x in st.export(state)}


def rewards(st, dtype):
    """A reward model with attention pooling and several scores a row; some ranks have no pair."""
    batches = []
    for i, rows in enumerate((8, 6, 2)):
        exp = tiny.experience(i, rows)
        texts = [exp.tokens[k, :n].tolist() for k, n in enumerate(exp.length.tolist())]
        batches.append(packing.scored(texts, ends=[sorted({0, len(x) // 2, len(x) - 1}) for x in texts]))
    rm = model.load_reward(tiny.llama(dtype=dtype), new=True, heads=("pair", "point"), pool="attention")
    return reward_model(st, rm, batches, dtype, adamw())


@wide()
def rewards_of_images(st, dtype):
    """A reward model that sees, pooled by mean: pairs of rows with and without images."""
    return media_rewards(st, dtype, "Qwen2VL")


@wide()
def rewards_of_sounds(st, dtype):
    """A reward model that hears; its ranks can share the tokens of a pack."""
    return media_rewards(st, dtype, "Voxtral")


def media_rewards(st, dtype, family):
    """Pairs of rows with two media, one and none; some ranks have text alone, and a batch has none."""
    family = sees_and_hears.FAMILIES[family]
    one, two, text = family.kinds[:1], family.kinds[:1] * 2, []
    kinds = ([one, text, two, one, text, text], [one, one, text, two], [text] * 4)
    batches = [share(st, sees_and_hears.batch(family, rows, seed=i)) for i, rows in enumerate(kinds)]
    rm = model.load_reward(family.build(dtype), new=True, heads=("pair", "point"), pool="mean")
    return reward_model(st, rm, batches, dtype, optim.adamw(1e-2, eps=1e-2))


class Table(nn.Module):
    """A model of one's own: log-probs of a table by the token before."""

    def __init__(self, dtype):
        super().__init__()
        v = len(tiny.tokenizer())
        start = torch.randn(v, v, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        self.logits = nn.Parameter(start.to(dtype))

    def forward(self, pack):
        logp = self.logits[pack.tokens].log_softmax(-1)
        return rft.TokenOut(logp=logp.gather(-1, pack.target[:, None])[:, 0] * pack.mask)


def own(st, dtype):
    """A module that is no language model; it cannot share the tokens of a pack, and says so."""
    if st.config.sp_size > 1:
        try:
            st.init(Table(dtype), adamw())
        except ValueError as error:
            assert "sp_size: expected 1 for Table" in str(error)
            st = get_strategy(StrategyConfig(fsdp=True))
    return train(st, Table(dtype), dtype=dtype)[0]


def files(st, dtype):
    """The folder that transformers loads gives the trained model's log-probs."""
    from transformers import AutoModelForCausalLM

    lm, _, state, apply = plain(st, dtype)
    folder = shared_folder(st)
    st.save_pretrained(folder, lm, tiny.tokenizer(), st.export(state))
    rft.dist.barrier()
    packs = st.shard(experience(0, dtype=dtype), 40)
    mine = model.score(apply, state.params, packs)
    theirs = model.score(*model.bind(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)), packs)
    assert all(
        torch.allclose(a, b, atol=1e-12 if dtype == torch.float64 else 1e-5) for a, b in zip(mine, theirs)
    )
    return {n: x.clone() for n, x in st.export(state)}


def adapters(st, dtype):
    """The files of trained adapters, for peft on the base model, and of the model that they are merged into:
    both have the log-probs of the trained one."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lm, _, state, apply = adapted(st, dtype)
    folder, weights = shared_folder(st), {n: x.clone() for n, x in st.export(state)}
    st.save_pretrained(f"{folder}/adapters", lm, tiny.tokenizer(), st.export(state))
    st.save_pretrained(f"{folder}/merged", lm, tiny.tokenizer(), weights.items(), merge=True)
    rft.dist.barrier()
    packs = st.shard(experience(0, dtype=dtype), 40)
    mine = model.score(apply, state.params, packs)
    beside = PeftModel.from_pretrained(
        tiny.llama(dtype=dtype), f"{folder}/adapters", autocast_adapter_dtype=False
    )
    merged = AutoModelForCausalLM.from_pretrained(f"{folder}/merged", dtype=dtype)
    for lm in (beside, merged):
        for a, b in zip(mine, model.score(*model.bind(lm.requires_grad_(True)), packs)):
            assert torch.allclose(a, b, atol=1e-10 if dtype == torch.float64 else 1e-4)
    assert float((mine[0] - model.score(*model.bind(tiny.llama(dtype=dtype)), packs)[0]).abs().max()) > 1e-3
    return weights


def options(st, dtype):
    """Clipping, cuts, columns and the optimizer's place by the config instead of by the script."""
    more = {"max_norm": 0.3, "adam_offload": True, "micro_train_batch_size": 3, "chunk_size": 5}
    more |= {"packing_samples": False, "fsdp_cpu_offload": st.config.backend == "fsdp2"}
    st = get_strategy(dataclasses.replace(st.config, **more))
    assert all(b.num_seqs <= 3 for b in st.shard(experience(0), 1))
    return train(st, tiny.llama(dtype=dtype), tx=optim.adamw(1e-2), dtype=dtype)[0]


def narrow(st, dtype):
    """bfloat16 with float32 parameters, and bfloat16 parameters with float32 masters: near float32, and the
    masters keep steps that bfloat16 cannot. Gradients under ZeRO cannot be seen: test_deepspeed has it."""
    if st.config.backend == "deepspeed":
        return {}
    first = experience(0, dtype=torch.float32)
    exact = {}
    for name, more in (("float32", {}), ("bf16", {"bf16": True}), ("use_mp_opt", {"use_mp_opt": True})):
        one = get_strategy(dataclasses.replace(st.config, **more))
        apply, state = one.init(tiny.llama(dtype=torch.float32), optim.adamw(1e-5))
        assert {p.dtype for p in state.params.values()} == {
            torch.bfloat16 if name == "use_mp_opt" else torch.float32
        }
        before = {n: x.float().clone() for n, x in one.export(state)}
        grads, _ = one.grad(state, apply, loss_fn, one.shard(first, 40))
        assert {g.dtype for g in grads.values()} == {torch.float32}
        norm, whole = (
            float(optim.global_norm(grads)),
            {n: g.clone() for n, g in one.export(tree.replace(state, params=grads))},
        )
        exact = exact or whole
        apart = sum(float((whole[n] - exact[n]).square().sum()) for n in whole) ** 0.5 / norm
        assert apart == 0 if name == "float32" else 0 < apart < 0.05, (name, apart)
        state, _ = one.update(state, grads)
        kept = tree.replace(state, params=state.opt.master) if name == "use_mp_opt" else state
        moved = max(float((x.float() - before[n]).abs().max()) for n, x in one.export(kept))
        assert 0 < moved < 1e-2, (name, moved)
    return {}


def unfilled(st, dtype):
    """A model that is loaded without memory reads its own shards from the folder."""
    folder = shared_folder(st)
    if rft.dist.is_main():
        tiny.llama(2, dtype=dtype).save_pretrained(folder, max_shard_size="20KB")
    rft.dist.barrier()
    lm = model.load(folder, meta=True, dtype=dtype)
    assert all(p.is_meta for p in lm.parameters())
    return train(st, lm, dtype=dtype)[0]


def shared_folder(st):
    box = [tempfile.mkdtemp()]
    if st.world > 1:
        torch.distributed.broadcast_object_list(box)
    return box[0]


def trees(st, dtype):
    """gather and all_reduce of trees, ragged ones too; what went in stays as it is."""
    mine = torch.arange(6.0, dtype=dtype).view(2, 3)[:, : 2 + (st.rank == st.world - 1)] + 10 * st.rank
    x = {"rows": mine, "n": st.rank}
    kept = mine.clone()
    all_ = st.gather({"rows": mine, "flag": torch.tensor([st.rank == 0])})
    assert (
        torch.equal(mine, kept) and all_["rows"].shape == (2 * st.world, 3) and int(all_["flag"].sum()) == 1
    )
    for r in range(st.world):
        assert float(all_["rows"][2 * r, 0]) == 10 * r
    gathers_media(st)
    total, most = st.all_reduce({"n": st.rank, "x": mine[0, :2]}, "sum"), st.all_reduce(st.rank, "max")
    assert total["n"] == st.world * (st.world - 1) // 2 and most == st.world - 1 and x["n"] == st.rank
    assert st.all_reduce(st.rank) == (st.world - 1) / 2 and torch.equal(mine, kept)
    return {}


def gathers_media(st):
    """Of two rows a rank: the first rank has pixels, others have sounds of their own lengths, and the last of
    several has none at all."""
    sound = torch.full((st.rank, 2 + st.rank), float(st.rank))
    mine = {"pixels": (torch.ones(3, 2), [1, 2])} if st.rank == 0 else {"sound": (sound, [0, st.rank])}
    if st.rank and st.rank == st.world - 1:
        mine = {}
    parts = [{k: x.split(n)[i] for k, (x, n) in mine.items()} for i in range(2)]
    media = rft.types.Media.of_prompts(parts)
    exp = tree.replace(tiny.experience(0, rows=2), media=media)
    found = st.gather({"exp": exp, "none": tree.replace(exp, media=None)})
    assert found["none"].media is None and len(found["exp"].tokens) == 2 * st.world
    got = found["exp"].media
    assert (
        got.count("pixels").tolist() == [1, 2, *[0] * (2 * st.world - 2)]
        and got.tensors["pixels"].sum() == (st.rank == 0) * 6
    )
    if st.world > 2:
        want = [n for r in range(st.world) for n in (0, r if 0 < r < st.world - 1 else 0)]
        assert got.count("sound").tolist() == want and len(got.tensors["sound"]) == len(sound) % (
            st.world - 1
        )
        if st.rank == 1:
            assert got.take([3]).sequences()["sound"].tolist() == [[1.0, 1.0, 1.0, 0.0]]


CASES = {
    f.__name__: f
    for f in (
        grpo, untied, budgets, flat, one_prompt, checkpointing, snapshot, whole_logits, lora, ppo, pairs,
        reference, average, skipped,
        own, files, adapters, options, narrow, unfilled, trees, average_scores, images, deepstack, audio,
        rewards, rewards_of_images, rewards_of_sounds,
    )
}  # fmt: skip


def digest(out):
    buffer = io.BytesIO()
    torch.save({k: v for k, v in sorted(out.items())}, buffer)
    return hashlib.blake2b(buffer.getvalue()).hexdigest()


def attempt(st, case, dtype):
    """What a case returns, or how it failed; new adapters and heads are drawn as with a new strategy."""
    torch.manual_seed(st.config.seed)
    try:
        return CASES[case](st, dtype)
    except Exception:
        return {"error": traceback.format_exc()}


def local(case, dtype):
    return attempt(get_strategy(StrategyConfig()), case, dtype)


def on_ranks(rank, names, cases):
    """{(backend, case): results} of every backend in `names`; ranks that disagree are an error."""
    processes = rft.dist.begin(600.0)  # one group for all strategies, which come and go
    out = {}
    for name in names:
        _, options, dtype = BACKENDS[name]
        st = get_strategy(StrategyConfig(**options))  # one for all cases: DTensor knows its mesh
        for case in cases:
            found = attempt(st, case, dtype)
            same = rft.dist.all_gather_object(digest(found))
            if len(set(same)) > 1 and "error" not in found:
                found = {"error": f"ranks disagree: {same}"}
            out[name, case] = found if rank == 0 or "error" in found else {}
        st.close()
    processes.close()
    return out
