"""Single tokens of some responses: the numbers that are recorded, against their definitions."""

import json
from functools import partial

import numpy as np
import pytest
import ref
import torch
from hypothesis import given
from hypothesis import strategies as some

import rft_fn as rft
from rft_fn.packing import supervised
from rft_fn.run.token_texts import pieces
from rft_fn.run.tokens import SAMPLES, TokenLog, effects


class Bytes:
    """A tokenizer of bytes."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """A tokenizer whose decoding puts spaces between words."""

    def decode(self, ids):
        return " ".join(f"w{i}" for i in ids)


@given(some.text(max_size=20))
def test_pieces_of_bytes_are_whole_characters_that_join_to_the_text(text):
    found = pieces(list(text.encode()), Bytes())
    assert len(found) == len(text.encode()) and "".join(found) == text
    assert [x for x in found if x] == list(text)


def test_pieces_keep_what_decoding_puts_between_tokens_and_an_unfinished_end():
    assert pieces([1, 2, 3], Words()) == ["w1", " w2", " w3"]
    assert pieces(list("aé".encode())[:2], Bytes()) == ["a", "\ufffd"]
    assert pieces([], Bytes()) == []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(the rows of tokens.jsonl, the experience, the log-probs before and after) of three updates."""
    st = rft.strategy.get_strategy()
    tokenizer = rft.model.load_tokenizer("tiny")
    apply, state = st.init(rft.model.load("tiny"), rft.optim.adamw(3e-2), entropy=True)
    eng = rft.engine.get_engine(None, "tiny")
    data = rft.data.load("sort_digits:1", tokenizer, template="{short}")
    prompts, keys = rft.data.draw(data, 3, step=0, seed=0)
    how = {"n": 10, "sampling": rft.Sampling(max_new=6)}
    rollout = rft.collect.gather_and_generate(eng, st, prompts, keys, **how)
    own = st.score(apply, state.params, rollout, 512).logp
    reward = torch.arange(30.0).view(3, 10) % 4
    adv = rft.advantage.grpo(reward).view(-1, 1) * rollout.mask
    exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(rollout.mask), old_logp=own)
    judged = rft.reward.Judged(reward, {}, [""] * 30, {}, {"conversation": [[{"role": "user"}]] * 30})

    def loss_fn(out, b):
        return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv)

    run = rft.run.Run(tmp_path_factory.mktemp("runs") / "r", {"lr": 1}, total=4)
    log = TokenLog(st, run, apply, loss_fn, tokenizer, every=2, group=10, budget=256)
    sampler = rft.tree.replace(rollout, logp=torch.where(rollout.mask, own - 0.25, 0))
    for step in range(3):
        log.before(step, state.params, sampler)
        first = st.score(apply, state.params, rollout, 512, fields=("logp", "entropy"))
        grads, _ = st.grad(state, apply, loss_fn, st.shard(exp, 512))
        state, _ = st.update(state, grads)
        log.after(step, state.params, exp, prompts, judged, sampler)
    last = st.score(apply, state.params, rollout, 512).logp
    rows = [json.loads(line) for line in (run.folder / "tokens.jsonl").read_text().splitlines()]
    run.finish()
    return rows, exp, first, last, prompts, tokenizer


def test_the_first_responses_of_the_first_groups_are_recorded_every_so_often(recorded):
    rows, exp, *_, prompts, tokenizer = recorded
    assert [row["step"] for row in rows] == [0] * 2 * SAMPLES + [2] * 2 * SAMPLES
    assert [(row["group"], row["sample"]) for row in rows[:9]] == [*((0, s) for s in range(8)), (1, 0)]
    for row in rows:
        b = row["group"] * 10 + row["sample"]
        assert row["prompt"] == prompts[row["group"]].text and row["reward"] == b % 4
        assert "".join(row["pieces"]) == tokenizer.decode(exp.tokens[b][exp.mask[b]])
        assert row["mask"] == [1] * len(row["pieces"]) and row["conversation"] == [{"role": "user"}]


def test_each_number_is_what_its_definition_says(recorded):
    rows, exp, first, last, *_ = recorded
    clipped = 0
    for row in rows[2 * SAMPLES :]:
        b = row["group"] * 10 + row["sample"]
        m = exp.mask[b]
        old, adv, w = exp.old_logp[b][m], exp.adv[b][m], exp.w[b][m]
        close = partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-5)
        close(row["logp"], first.logp[b][m])
        close(row["entropy"], first.entropy[b][m])
        close(row["adv"], adv)
        close(row["w"], w)
        close(row["ratio"], (last[b][m] - old).exp())
        close(row["change"], last[b][m] - first.logp[b][m])
        close(row["mismatch"], first.logp[b][m] - (old - 0.25))
        close(row["push"], -ref.ppo_clip_gradient(first.logp[b][m], old, adv, w))
        want = ref.ppo_clip_gradient(last[b][m], old, adv, w) == 0
        assert row["clipped"] == (want & (adv.numpy() != 0)).astype(int).tolist()
        clipped += sum(row["clipped"])
    assert clipped > 0


def test_effects_of_rows_are_those_of_each_alone():
    exp = supervised([([5, 6], [7, 8, 1]), ([6], [9, 1]), ([4, 5], [6, 1]), ([7], [8, 9, 1])])
    torch.manual_seed(0)
    logp = torch.randn(exp.tokens.shape) * exp.mask
    exp = rft.tree.replace(exp, ref_logp=torch.zeros_like(logp), w=rft.weight.pair_mean(exp.mask))

    def loss_fn(out, b):
        sides = *rft.packing.sides(out.logp, b), *rft.packing.sides(b.ref_logp, b)
        return rft.loss.dpo(*sides, beta=0.3)[b.seq // 2]

    found = effects(loss_fn, exp, logp, unit=2)
    for pair in (torch.tensor([0, 1]), torch.tensor([2, 3])):
        alone = effects(loss_fn, rft.packing.take(exp, pair), logp[pair], unit=2)
        torch.testing.assert_close(found[pair], alone)

    # the chosen side gains what the rejected side loses, each token as much as any other of its side
    s = (logp.sum(-1).view(2, 2) * torch.tensor([1.0, -1.0])).sum(-1)
    want = -0.3 * torch.sigmoid(-0.3 * s) / 2
    for b, sign in enumerate((1, -1, 1, -1)):
        torch.testing.assert_close(
            found[b][exp.mask[b]], (sign * want[b // 2]).expand(int(exp.mask[b].sum()))
        )


def test_a_batch_without_a_whole_group_is_not_recorded(tmp_path):
    st = rft.strategy.get_strategy()
    tokenizer = rft.model.load_tokenizer("tiny")
    apply, state = st.init(rft.model.load("tiny"), rft.optim.adamw(1e-2), entropy=True)
    exp = supervised([([3, 4], [5, 6]), ([3], [7, 8])])
    run = rft.run.Run(tmp_path / "r", {"lr": 1}, total=1)
    log = TokenLog(st, run, apply, lambda out, b: -out.logp, tokenizer, every=1, budget=64, group=3)
    log.before(0, state.params, exp)
    log.after(0, state.params, exp)
    run.finish()
    assert not (tmp_path / "r" / "tokens.jsonl").exists()


def test_rows_of_a_group_have_the_names_that_a_script_gives_them(tmp_path):
    st = rft.strategy.get_strategy()
    tokenizer = rft.model.load_tokenizer("tiny")
    apply, state = st.init(rft.model.load("tiny"), rft.optim.adamw(1e-3))
    lessons = supervised(
        [(tokenizer.encode(q), tokenizer.encode(a)) for q, a in (("12=", "12"), ("12=", "21"))]
    )
    run = rft.run.Run(tmp_path / "r", {"lr": 1}, total=1)
    how = {"every": 1, "group": 2, "budget": 64, "names": ("chosen", "rejected")}
    log = TokenLog(st, run, apply, lambda out, b: rft.loss.nll(out.logp), tokenizer, **how)
    log.before(0, state.params, lessons)
    log.after(0, state.params, lessons)
    rows = [json.loads(line) for line in (run.folder / "tokens.jsonl").read_text().splitlines()]
    assert [(row["name"], "".join(row["pieces"])[-2:]) for row in rows] == [
        ("chosen", "12"),
        ("rejected", "21"),
    ]
    run.finish()


def test_without_the_option_nothing_is_scored_or_written(tmp_path):
    run = rft.run.Run(tmp_path / "r", {"lr": 1}, total=1)
    log = TokenLog(None, run, None, None, None, every=0, budget=1)
    log.before(0, None, None)
    log.after(0, None, None)
    assert not (run.folder / "tokens.jsonl").exists()
    run.finish()
