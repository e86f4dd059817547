"""Rewards over the ranks: shares, one result for all, errors of one rank, and the limit of time."""

import asyncio
import dataclasses
import signal
import socket
import threading
import time

import pytest
import ranks
import tiny
import torch
from each_case import each
from script_runs import alone

import rft_fn as rft
from rft_fn import collect, data, dist, reward
from rft_fn.engine import time_limit
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

G = 3
TEXTS = [f"{n}{n * n}" for n in range(5 * G)]
PROMPTS = [data.Prompt([3, 4], f"{i}=", {"answer": str(i), "row": i}, i) for i in range(5)]


def rollout_of(texts=TEXTS, group=None):
    return tiny.said(texts, torch.arange(len(texts)) // G if group is None else group)


def digits(completions, row):
    """A third of the sum of digits, and the prompt's number: no round float32, different everywhere."""
    return [sum(map(int, c)) / 3 + r for c, r in zip(completions, row)]


def zero_on_rank_1(completions, row):
    return [0.0 if dist.rank() == 1 else x for x in digits(completions, row)]


def fails_on_rank_1(completions):
    if dist.rank() == 1:
        raise KeyError("judge server: connection timed out")
    return [0.0 for _ in completions]


def hangs_on_rank_1(completions):
    if dist.rank() == 1:
        time.sleep(60)
    return [0.0 for _ in completions]


def judged_by(st, fn, prompts=PROMPTS, texts=TEXTS, timeout=60.0):
    score = reward.weighted(mine=(fn, 0.7), length=(lambda completions: [len(c) for c in completions], 0.1))
    rollout = rollout_of(texts)
    return collect.gather_and_judge(st, score, rollout, prompts, tiny.tokenizer(), timeout=timeout)


def length(completions):
    return [float(len(c)) for c in completions]


async def waits(completions, row):
    """Async, answers None for odd rows and dicts for the others."""
    await asyncio.sleep(0.001)
    return [None if r % 2 else {"score": len(c), "half": r / 2, "text": c} for c, r in zip(completions, row)]


def logs_on_rank_1(completions, trainer_state, completion_ids, log_metric, log_extra):
    if dist.rank() == 1:
        log_metric("step", trainer_state.global_step)
        log_extra("ids", [len(ids) for ids in completion_ids])
    return [1.0 for _ in completions]


def judged_in_full(st):
    """Everything that a reward may do, over the ranks; in messages."""
    score = reward.weighted(waits=(waits, 1.0), logs=(logs_on_rank_1, 0.5))
    spoken = [dataclasses.replace(p, messages=[{"role": "user", "content": p.text}]) for p in PROMPTS]
    judged = collect.gather_and_judge(
        st, reward.weighted(**{k: (reward.foreign.texts(fn), w) for k, (fn, w) in score.components.items()}),
        rollout_of(), spoken, tiny.tokenizer(), state=reward.trainer_state(7, 9),
    )  # fmt: skip
    return judged._asdict() | {"means": reward.means(judged, "reward")}


def plain(judged):
    return judged.reward, judged.parts, judged.texts


def fill(st, fn):
    """Three groups whose rewards differ, of up to two rounds of five."""

    def gathered(prompts, keys):
        score = reward.weighted(mine=(fn, 1.0))
        rollout = rollout_of()
        return rollout, collect.gather_and_judge(st, score, rollout, prompts, tiny.tokenizer(), timeout=60.0)

    filled = collect.sample_varied_groups(gathered, lambda i: (PROMPTS, range(5)), 3, rounds=2)
    return [p.index for p in filled.prompts], filled.rounds, plain(filled.judged)


def every_case(rank):
    """The results of each rank, and its errors."""
    st = get_strategy(StrategyConfig())
    out = {"whole": plain(judged_by(st, digits)), "zero": plain(judged_by(st, zero_on_rank_1))}
    out["few"] = plain(judged_by(st, digits, PROMPTS[:1], TEXTS[:G]))
    out["filled"] = fill(st, zero_on_rank_1)
    out["full"] = judged_in_full(st)
    rows, asked = [{"question": "1", "answer": "1"}], []

    def counts(completions):
        asked.append(rank)
        return [float(len(c)) for c in completions]

    def fails_on_rank_0(completions):
        return [{}["key"] for _ in completions] if rank == 0 else [0.0 for _ in completions]

    checked = collect.check_reward(st, reward.weighted(mine=(counts, 1.0)), rows, timeout=60.0)
    out["checked"] = {name: x.total for name, x in checked.items()}, asked
    odd = [dataclasses.replace(p, text=p.text + "?" * rank) for p in PROMPTS]
    cases = {
        "fails": lambda: judged_by(st, fails_on_rank_1),
        "hangs": lambda: judged_by(st, hangs_on_rank_1, timeout=1.0),
        "odd": lambda: judged_by(st, digits, odd),
        "check": lambda: collect.check_reward(st, reward.weighted(mine=(fails_on_rank_0, 1.0)), rows),
    }
    for name, case in cases.items():
        began = time.monotonic()
        try:
            case()
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            out[name] = type(error).__name__, str(error), notes, time.monotonic() - began
    return out


@pytest.fixture(scope="module")
def found():
    return ranks.run(2, "test_judging:every_case", timeout=120)


def same(a, b):
    assert torch.equal(a[0], b[0]) and a[0].dtype == b[0].dtype
    assert list(a[1]) == list(b[1]) and all(torch.equal(a[1][k], b[1][k]) for k in a[1])
    assert a[2] == b[2]


def test_two_ranks_have_what_one_process_has_to_the_bit(found):
    alone = plain(judged_by(get_fake_strategy(), digits))
    assert alone[2] == TEXTS and alone[0].shape == (5, G) and alone[0].unique().numel() > 8
    for rank in range(2):
        same(found[rank]["whole"], alone)
        same(found[rank]["few"], tuple([alone[0][:1], {k: v[:1] for k, v in alone[1].items()}, TEXTS[:G]]))


def test_a_reward_that_differs_by_rank_is_the_same_on_all(found):
    """Rank 1 answers 0: for the groups that it scores, the last two, and on every rank alike."""
    same(found[0]["zero"], found[1]["zero"])
    part, whole = found[0]["zero"][1]["mine"], found[0]["whole"][1]["mine"]
    assert torch.equal(part[:3], whole[:3]) and not part[3:].any() and whole[3:].all()


def test_what_a_reward_raises_on_one_rank_is_raised_on_all(found):
    kind, text, notes, _ = found[1]["fails"]
    assert (kind, notes) == ("KeyError", ["raised by the reward 'mine'"]) and "connection timed out" in text
    kind, text, _, _ = found[0]["fails"]
    assert kind == "ValueError"
    assert text == "rank 1: reward 'mine': KeyError: 'judge server: connection timed out'"


def test_a_reward_that_hangs_on_one_rank_ends_on_all(found):
    line = "reward 'mine': expected a result within 1 s, the limit for a batch, got none; "
    line += "make it faster, or raise the limit"
    assert found[1]["hangs"][:2] == ("TimeoutError", line)
    assert found[0]["hangs"][:2] == ("ValueError", f"rank 1: {line}")
    assert all(x["hangs"][3] < 30 for x in found)


def test_ranks_fill_a_batch_with_the_same_groups(found):
    """Rank 1 flattens the last two groups; both ranks leave them out."""
    assert found[0]["filled"][:2] == found[1]["filled"][:2] == ([0, 1, 2], 1)
    same(found[0]["filled"][2], found[1]["filled"][2])


def test_ranks_with_other_prompts_are_refused(found):
    for rank in range(2):
        line = (
            f"prompts: expected the same on every rank, got others on rank {1 - rank} than on rank {rank}; "
        )
        line += "give all ranks the same data file and options"
        assert found[rank]["odd"][:2] == ("ValueError", line)


def test_a_reward_is_checked_by_one_rank_for_all(found):
    rows = [{"question": "1", "answer": "1"}]
    with pytest.warns(UserWarning, match="no more than garbage"):
        want = collect.check_reward(get_fake_strategy(), reward.weighted(mine=(length, 1.0)), rows)
    for rank in range(2):
        assert found[rank]["checked"][0] == {name: x.total for name, x in want.items()}
    assert [len(x["checked"][1]) for x in found] == [len(want), 0]
    assert found[0]["check"][:2] == ("KeyError", "'key'")
    assert found[1]["check"][:2] == ("ValueError", "rank 0: reward 'mine': KeyError: 'key'")


def test_nones_metrics_and_texts_are_the_same_on_every_rank(found):
    """Rank 1 scores the last two groups, and logs. What is not there is NaN, or None among the texts."""
    alone = judged_in_full(get_fake_strategy())
    for rank in range(2):
        full = found[rank]["full"]
        assert torch.equal(full["reward"], alone["reward"]) and full["texts"] == TEXTS
        for key in ("waits", "logs"):
            torch.testing.assert_close(full["parts"][key], alone["parts"][key], equal_nan=True)
        assert full["parts"]["waits"].isnan().any(-1).tolist() == [False, True, False, True, False]
        assert full["metrics"]["waits/half"][::2].tolist() == [[0.0] * G, [1.0] * G, [2.0] * G]
        assert full["metrics"]["waits/half"][1::2].isnan().all()
        assert full["metrics"]["logs/step"][3:].tolist() == [[7.0] * G] * 2
        assert full["metrics"]["logs/step"][:3].isnan().all()
        assert (
            full["extra"]["waits/text"][:G] == TEXTS[:G]
            and full["extra"]["waits/text"][G : 2 * G] == [None] * G
        )
        assert full["extra"]["logs/ids"] == [None] * 3 * G + [len(t) for t in TEXTS[3 * G :]]
        assert full["means"]["reward/waits/skipped"] == pytest.approx(0.4)
        assert full["means"]["reward/waits/half"] == 1.0 and full["means"]["reward/logs/step"] == 7.0
        assert full["means"]["reward/mean"] == pytest.approx(alone["reward"].mean().item())


def test_groups_that_are_joined_and_chosen_keep_what_rewards_said():
    """As dynamic sampling does it: a metric of one rollout alone is NaN for the others."""
    a = reward.Judged(
        torch.ones(1, 2), {"p": torch.zeros(1, 2)}, ["a", "b"], {"p/m": torch.ones(1, 2)}, {"p/x": [1, 2]}
    )
    b = reward.Judged(torch.zeros(2, 2), {"p": torch.ones(2, 2)}, ["c", "d", "e", "f"])
    both = reward.concat([b, a])
    assert both.metrics["p/m"].isnan().tolist() == [[True, True], [True, True], [False, False]]
    assert both.extra == {"p/x": [None] * 4 + [1, 2]} and both.texts == ["c", "d", "e", "f", "a", "b"]
    chosen = reward.select(both, [2, 0])
    assert chosen.texts == ["a", "b", "c", "d"] and chosen.extra == {"p/x": [1, 2, None, None]}
    assert chosen.reward.tolist() == [[1, 1], [0, 0]] and chosen.parts["p"].tolist() == [[0, 0], [1, 1]]
    assert chosen.metrics["p/m"][0].tolist() == [1, 1] and chosen.metrics["p/m"][1].isnan().all()


def test_one_process_is_reward_judge():
    score = reward.weighted(mine=(digits, 1.0))
    rollout = rollout_of()
    want = reward.judge(score, rollout, PROMPTS, tiny.tokenizer())
    found = collect.gather_and_judge(get_fake_strategy(), score, rollout, PROMPTS, tiny.tokenizer())
    same(plain(found), want)


def test_a_part_is_those_rows_of_the_whole():
    score = reward.weighted(mine=(digits, 1.0))
    whole = reward.judge(score, rollout_of(), PROMPTS, tiny.tokenizer())
    part = reward.judge(score, rollout_of(), PROMPTS, tiny.tokenizer(), part=slice(1, 3))
    same(part, (whole.reward[1:3], {"mine": whole.parts["mine"][1:3]}, TEXTS[G : 3 * G]))


def hangs(completions):
    time.sleep(60)
    return [0.0 for _ in completions]


def hangs_on_a_lock(completions):
    threading.Event().wait(60)
    return [0.0 for _ in completions]


def hangs_on_a_server(completions):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return [float(ours.recv(1)) for _ in completions]


async def hangs_async(completions):
    await asyncio.sleep(60)
    return [0.0 for _ in completions]


def hangs_and_catches(completions):
    """As many rewards that ask a server do."""
    out = []
    for _ in completions:
        try:
            time.sleep(60)
        except Exception:
            out.append(0.0)
    return out


def hangs_and_catches_all(completions):
    try:
        time.sleep(60)
    except:  # noqa: E722
        return [0.0 for _ in completions]


@pytest.mark.parametrize(
    "fn", [hangs, hangs_on_a_lock, hangs_on_a_server, hangs_async, hangs_and_catches, hangs_and_catches_all]
)
def test_a_reward_that_hangs_is_interrupted_and_named(fn):
    handler, began = signal.getsignal(time_limit.SIGNAL), time.monotonic()
    message = "^reward 'mine': expected a result within 0.2 s, the limit for a batch, got none"
    with pytest.raises(TimeoutError, match=message):
        judged_by(get_fake_strategy(), fn, timeout=0.2)
    assert time.monotonic() - began < 10
    assert signal.getsignal(time_limit.SIGNAL) == handler
    judged_by(get_fake_strategy(), digits)


def test_the_phase_is_the_reward():
    seen = []
    st = get_fake_strategy()

    def look(completions):
        seen.append(st.session.current_phase)
        return [0.0 for _ in completions]

    judged_by(st, look)
    assert seen == ["reward mine, length"]


STUBBORN = """
import re, time, test_judging
from rft_fn.engine import time_limit
from rft_fn.strategy import get_fake_strategy

time_limit.GRACE = 0.3

def stubborn(completions):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            time.sleep(60)
        except BaseException:
            pass

test_judging.judged_by(get_fake_strategy(), stubborn, timeout=0.2)
"""


def test_a_reward_that_cannot_be_interrupted_ends_the_process_with_a_line():
    found = alone(STUBBORN)
    assert found.returncode == 2
    line = found.stderr.strip().splitlines()[-1]
    assert line.startswith("error: reward 'mine': expected a result within 0.2 s") and "interrupted" in line


GREEDY = """
import ctypes, test_judging
from rft_fn.engine import time_limit
from rft_fn.strategy import get_fake_strategy

time_limit.GRACE = 0.3

def greedy(completions):
    ctypes.PyDLL(None).sleep(60)  # C code that keeps the lock of the interpreter

test_judging.judged_by(get_fake_strategy(), greedy, timeout=0.2)
"""


def test_a_reward_that_lets_no_thread_run_ends_the_process_with_its_stack():
    began = time.monotonic()
    found = alone(GREEDY)
    assert found.returncode == 1 and time.monotonic() - began < 50
    assert "Timeout" in found.stderr and " in greedy" in found.stderr


def test_outside_of_the_main_thread_the_line_is_a_warning(capsys):
    """Nothing can be raised there: the reward is waited for, and its result counts."""

    def slow(completions):
        time.sleep(0.4)
        return [1.0 for _ in completions]

    out = []
    thread = threading.Thread(target=lambda: out.append(judged_by(get_fake_strategy(), slow, timeout=0.1)))
    thread.start()
    thread.join()
    assert out[0].parts["mine"].tolist() == [[1.0] * G] * 5
    assert "warning: reward 'mine': expected a result within 0.1 s" in capsys.readouterr().err


@each("timeout", [0, -1.0, float("nan")])
def test_a_limit_is_above_zero(timeout):
    with pytest.raises(ValueError, match=r"^timeout: expected > 0 seconds, got"):
        judged_by(get_fake_strategy(), digits, timeout=timeout)


ROWS = [g for g in range(5) for _ in range(G)]


@each(
    ("group", "prompts", "message"),
    [
        ([0, 0, 0, 0, 1, 1, 2, 2], 4, "as many rows of each of 4 groups, got 4 of group 0 and 2 of group 1"),
        ([0, 0, 0, 0], 2, "as many rows of each of 2 groups, got 4 of group 0 and 0 of group 1"),
        ([0, 0, 1], 2, "as many rows of each of 2 groups, got 2 of group 0 and 1 of group 1"),
        ([1, 0, 2, 1, 0, 2], 3, "the rows of group 0 together, 2 of them, got group 1 in row 0"),
        ([1, 1, 0, 0], 2, "the rows of group 0 together, 2 of them, got group 1 in row 0"),
        ([0, 0, 1, 1, 0, 0, 1, 1], 2, "the rows of group 0 together, 4 of them, got group 1 in row 2"),
        ([0, 0, 1, 1, 2, 2], 2, "0 to 1 for 2 prompts, got 2 in row 4"),
        ([0, 0, -1, -1], 2, "0 to 1 for 2 prompts, got -1 in row 2"),
    ],
)
def test_a_rollout_whose_rows_are_not_the_prompts_in_order_is_refused(group, prompts, message):
    score = reward.weighted(mine=(digits, 1.0))
    rollout = rollout_of(TEXTS[: len(group)], group)
    with pytest.raises(ValueError, match=f"^rollout.group: expected {message}; judge each rollout with"):
        reward.judge(score, rollout, PROMPTS[:prompts], tiny.tokenizer())


def test_two_rollouts_put_together_are_refused():
    score = reward.weighted(mine=(digits, 1.0))
    both = rft.tree.map(lambda *x: torch.cat(x), rollout_of(), rollout_of())
    with pytest.raises(ValueError, match=r"^rollout.group: expected the rows of group 0 together, 6 of them"):
        reward.judge(score, both, PROMPTS, tiny.tokenizer())


@pytest.mark.parametrize(("prompts", "got"), [([[3, 4]] * 5, "list"), ([None] * 5, "NoneType")])
def test_prompts_without_text_are_refused(prompts, got):
    with pytest.raises(ValueError, match=f"^prompts: expected data.Prompt with text and columns, got {got}"):
        reward.judge(reward.weighted(mine=(digits, 1.0)), rollout_of(), prompts, tiny.tokenizer())


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match=r"^prompts: expected at least one, got none"):
        reward.judge(reward.weighted(mine=(digits, 1.0)), rollout_of([""], [0]), [], tiny.tokenizer())


def test_rows_are_judged_in_any_order():
    """As the whole rollout is, row by row; groups need not be of one size."""
    score = reward.weighted(mine=(digits, 1.0))
    rollout = rollout_of()
    whole = reward.judge(score, rollout, PROMPTS, tiny.tokenizer()).reward.flatten()
    some = [7, 0, 3, 3, 14]
    part = rft.rollout.take(rollout, some)
    assert torch.equal(reward.judge_rows(score, part, PROMPTS, tiny.tokenizer()), whole[some])
    assert torch.equal(reward.judge_rows(score, rollout, PROMPTS, tiny.tokenizer()), whole)
