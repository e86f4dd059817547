"""Conversations with environments: equal to their definition however they are batched and shared out."""

import time
from typing import NamedTuple

import pytest
import ranks
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as hs
from spoken import END, Spoken, words

import rft_fn as rft
from rft_fn import collect, data, rng, tree
from rft_fn.collect.episodes import Conversation, assembled
from rft_fn.environment import Environment, Renderer, Stepped
from rft_fn.environment.tiny_models import new_tokenizer
from rft_fn.strategy import StrategyConfig, get_strategy
from rft_fn.types import Sampling

TOK = tiny.tokenizer()
SETTINGS = settings(deadline=None, derandomize=True, max_examples=15)


class Chain(NamedTuple):
    """Turns are left, and the last letter that was said."""

    left: int
    noise: int


def chain_step(state, response):
    """Goes on as long as the row says, but ends at an "a"; the reward is the number of letters."""
    left = state.left - 1
    done = left == 0 or "a" in response
    return Stepped(state._replace(left=left), f"{len(response)}:{state.noise}=", len(response) / 8, done)


CHAIN = Environment("chain", lambda row, key: (Chain(int(row["turns"]), key % 7), None), chain_step)


def rows(turns):
    return [
        data.Prompt(TOK.encode(f"{i}{t}="), f"{i}{t}=", {"turns": str(t)}, i) for i, t in enumerate(turns)
    ]


def play(prompts, keys, *, env=CHAIN, n=3, max_new=5, max_turns=6, max_tokens=80, **how):
    st, speak = how.pop("st", None), how.pop("speak", words)
    spoken = Spoken(speak)
    played = collect.play(
        spoken.engine(), st or get_strategy(), env, prompts, keys, Renderer(TOK), n=n,
        sampling=Sampling(max_new=max_new), max_turns=max_turns, max_tokens=max_tokens, **how,
    )  # fmt: skip
    return played, spoken


def definition(prompt, key, sample, *, max_new, max_turns, max_tokens):
    """One conversation, token by token: (tokens, mask, logp, token_reward, the limit that cut it)."""
    state = Chain(int(prompt.columns["turns"]), key % 7)
    tokens, mask, logp, reward = list(prompt.ids), [], [], []
    mask = [False] * len(tokens)
    logp = [0.0] * len(tokens)
    reward = [0.0] * len(tokens)
    for turn in range(max_turns):
        room = min(max_new, max_tokens - len(tokens))
        said, _ = words(tokens, rng.fold_in(rng.fold_in(key, sample, 0, turn), 0), room)
        logp += [-(len(tokens) + i) / 100 for i in range(len(said))]
        tokens += said
        mask += [True] * len(said)
        letters = [t for t in said if t != END]
        reward += [0.0] * (len(said) - 1) + [len(letters) / 8]
        state = state._replace(left=state.left - 1)
        if state.left == 0 or TOK.encode("a")[0] in letters:
            return tokens, mask, logp, reward, ""
        answer = TOK.encode(f"{len(letters)}:{state.noise}=")
        if turn + 1 == max_turns:
            return tokens, mask, logp, reward, "turns"
        if len(tokens) + len(answer) >= max_tokens:
            return tokens, mask, logp, reward, "tokens"
        tokens += answer
        mask += [False] * len(answer)
        logp += [0.0] * len(answer)
        reward += [0.0] * len(answer)


@given(
    hs.lists(hs.integers(1, 6), min_size=1, max_size=4), hs.integers(1, 3), hs.integers(1, 5),
    hs.integers(1, 5), hs.integers(5, 60),
)  # fmt: skip
@SETTINGS
def test_conversations_are_those_sampled_one_at_a_time(turns, n, max_new, max_turns, max_tokens):
    prompts, keys = rows(turns), [rng.fold_in(5, i) for i in range(len(turns))]
    how = {"max_new": max_new, "max_turns": max_turns, "max_tokens": max_tokens}
    played, _ = play(prompts, keys, n=n, **how)
    r = played.rollout
    for b in range(len(prompts) * n):
        i, j = divmod(b, n)
        tokens, mask, logp, reward, cut = definition(prompts[i], keys[i], j, **how)
        size = len(tokens)
        assert r.tokens[b, :size].tolist() == tokens and r.length[b] == size <= max_tokens
        assert r.mask[b].tolist() == mask + [False] * (r.mask.shape[1] - size)
        assert r.logp[b, :size].tolist() == pytest.approx(logp, abs=1e-6) and not r.logp[b, size:].any()
        assert played.token_reward[b, :size].tolist() == pytest.approx(reward)
        assert float(played.reward[i, j]) == pytest.approx(sum(reward))
        assert bool(r.truncated[b]) == bool(cut) and r.group[b] == i and r.version[b] == 3
        assert played.numbers["cut_by_turns"][b] == (cut == "turns")
        assert played.numbers["cut_by_tokens"][b] == (cut == "tokens")


@given(hs.permutations(range(4)))
@SETTINGS
def test_a_conversation_depends_on_its_key_alone(order):
    """Not on which others are sampled beside it, nor in what order."""
    turns = [3, 1, 5, 2]
    prompts, keys = rows(turns), [rng.fold_in(6, i) for i in range(4)]
    whole, _ = play(prompts, keys)
    moved, _ = play([prompts[i] for i in order], [keys[i] for i in order])
    alone = [play(prompts[i : i + 1], keys[i : i + 1])[0] for i in range(4)]
    for at, i in enumerate(order):
        for j in range(3):
            a, b, c = whole.rollout, moved.rollout, alone[i].rollout
            size = int(a.length[3 * i + j])
            for name in ("tokens", "mask", "logp"):
                x = getattr(a, name)[3 * i + j, :size].tolist()
                assert x == getattr(b, name)[3 * at + j, :size].tolist()
                assert x == getattr(c, name)[j, :size].tolist()
        assert torch.equal(whole.reward[i], moved.reward[at])


def test_turns_and_samples_have_draws_of_their_own():
    drawn = set()

    def noting(ids, key, most):
        drawn.add(key)
        return words(ids, key, most)

    played, _ = play(rows([6, 6]), [1, 2], speak=noting)
    assert len(drawn) == int(played.numbers["turns"].sum()) > 12


def test_rows_that_are_done_leave_the_batch_and_every_round_is_one_call():
    played, spoken = play(rows([1, 4, 2]), [1, 2, 3], n=2, speak=lambda ids, key, most: ([14, END], True))
    assert [len(ids) for ids in spoken.calls] == [6, 4, 2, 2]
    assert played.numbers["turns"].tolist() == [1, 1, 4, 4, 2, 2]


def test_sampled_tokens_are_never_rendered_again():
    """A tokenizer with a token for "12" would encode the text of the tokens 1 and 2 as that one."""
    tok = new_tokenizer(["12"])
    one, two = tok.encode("1 2".replace(" ", "+"))[0::2]
    assert tok.encode("12") == [len(tok) - 1] and tok.decode([one, two]) == "12"
    env = Environment("echo", lambda row, key: (0, None), lambda s, text: (s + 1, f"{text}=", 0.0, s == 1))
    spoken = Spoken(lambda ids, key, most: ([one, two, END], True))
    prompt = data.Prompt(tok.encode("a="), "a=", {}, 0)
    played = collect.play(
        spoken.engine(), get_strategy(), env, [prompt], [1], Renderer(tok), n=1,
        sampling=Sampling(max_new=4), max_turns=3, max_tokens=50,
    )  # fmt: skip
    said = [one, two, END]
    assert played.rollout.tokens[0].tolist() == [*prompt.ids, *said, len(tok) - 1, tok.encode("=")[0], *said]
    assert played.texts == ["12\n12"]
    assert [m["content"] for m in played.talks[0]] == ["a=", "12", "12=", "12", "12="]


def test_the_rewards_of_turns_are_what_the_advantages_take():
    """Reinforce++ gives each token what its turn and later ones earn, and nothing of earlier turns."""
    speak = lambda ids, key, most: ([14] * (1 + len(ids) % 3) + [END], True)  # noqa: E731
    played, _ = play(rows([3]), [1], n=1, speak=speak)
    mask = played.rollout.mask
    later = rft.advantage.reinforce_pp(played.token_reward, mask)[0]
    earned = played.token_reward[0]
    for t in mask[0].nonzero().flatten().tolist():
        assert float(later[t]) == pytest.approx(float(earned[t:].sum()))
    assert (earned > 0).sum() == 3 and played.reward.item() == pytest.approx(earned.sum().item())
    values = torch.zeros(mask.shape)
    adv, _ = rft.advantage.gae(played.token_reward, values, torch.ones(mask.shape), 1.0, mask=mask)
    torch.testing.assert_close(adv[0][mask[0]], later[mask[0]])


def two_seats(row, key):
    return 0, ["one:", None]


def take_turns(state, response):
    """Four turns, in turn; each is told to the other seat and pays both."""
    seen = [None, None]
    seen[1 - state % 2] = f"{response}:"
    return Stepped(state + 1, seen, [1.0, -float(state)], state == 3)


PAIR = Environment("pair", two_seats, take_turns, seats=2, seat=lambda state: state % 2)


def test_two_seats_have_tokens_and_rewards_of_their_own():
    prompts = rows([1, 1])
    played, _ = play(prompts, [1, 2], env=PAIR, n=2, max_turns=9)
    r = played.rollout
    assert r.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and played.reward.shape == (4, 2)
    assert [p.index for p in played.prompts] == [0, 0, 1, 1]
    first, second = (TOK.decode(r.tokens[b, : r.length[b]]) for b in (0, 2))
    a, b = (played.texts[row].split("\n")[0] for row in (0, 2))
    assert first.startswith(f"one:{a}") and second.startswith(f"{prompts[0].text}")
    assert f"{b}:" in first and f"{a}:" in second
    # the second seat is paid for the first turn too, before it has any token to put that on
    assert played.reward[0].tolist() == [4.0, 4.0] and played.reward[1].tolist() == [-6.0, -6.0]
    on_tokens = played.token_reward.sum(-1)
    assert on_tokens[0] == 4.0 and on_tokens[2] == -6.0


def on_ranks(rank):
    st = get_strategy(StrategyConfig())
    played, _ = play(rows([3, 1, 5]), [1, 2, 3], st=st)
    out = {"tokens": played.rollout.tokens, "reward": played.reward, "talks": played.talks}
    out |= {"token_reward": played.token_reward, "mask": played.rollout.mask}
    env = CHAIN._replace(step=lambda s, text: 1 / 0 if s.left == 5 else chain_step(s, text))
    try:
        play(rows([3, 1, 5]), [1, 2, 3], st=st, env=env)
    except ValueError as error:
        out["error"] = str(error)
    return out


def test_two_processes_give_the_numbers_of_one():
    one = on_ranks(0)
    for two in ranks.run(2, "test_turns:on_ranks"):
        for name in ("tokens", "mask", "reward", "token_reward"):
            assert torch.equal(one[name], two[name]), name
        assert one["talks"] == two["talks"]
        assert "environment 'chain': row 2, sample 0, turn 1: ZeroDivisionError" in two["error"]


def chained(**changes):
    return CHAIN._replace(**changes)


def raises(state, text):
    raise KeyError("no such thing")


async def fails_later(state, text):
    raise OSError("gone")


def leaves(state, text):
    raise SystemExit(3)


async def leaves_later(state, text):
    raise SystemExit(3)


class Untold(Exception):
    def __str__(self):
        raise SystemExit(4)


def fails_untold(state, text):
    raise Untold


STEP = "environment 'chain': row 0, sample 0, turn 1: "
BAD = [
    (chained(step=leaves), STEP + "SystemExit: 3"),
    (chained(step=leaves_later), STEP + "SystemExit: 3"),
    (chained(step=fails_untold), STEP + "Untold: Untold"),
    (chained(step=raises), STEP + "KeyError: 'no such thing'"),
    (chained(step=fails_later), STEP + "OSError: gone"),
    (chained(step=lambda s, t: (s, "x=")), STEP + "expected (state, observation, reward, done) from step"),
    (chained(step=lambda s, t: None), STEP + "expected (state, observation, reward, done) from step, got N"),
    (chained(step=lambda s, t: (s, "x=", float("nan"), False)), STEP + "expected a finite number"),
    (chained(step=lambda s, t: (s, "x=", "1", False)), STEP + "expected a finite number as the reward, got"),
    (chained(step=lambda s, t: (s, "x=", 1.0, 1)), STEP + "expected True or False as done, got 1"),
    (chained(step=lambda s, t: (s, 5, 1.0, False)), STEP + "expected a text or messages to observe"),
    (chained(step=lambda s, t: (s, [{"role": "user"}], 1.0, True)), STEP + "expected messages with role and"),
    (chained(step=lambda s, t: (s, "", 1.0, False)), STEP + "expected an observation for the next turn"),
    (chained(reset=lambda row, key: 3), "environment 'chain': row 0, sample 0, turn 0: expected (state, obs"),
    (chained(reset=lambda row, key: row["no"]), "environment 'chain': row 0, sample 0, turn 0: KeyError"),
    (chained(reset=lambda row, key: (0, "x" * 90)), "row 0, sample 0, turn 0: expected a prompt of 1 to 79"),
    (PAIR._replace(step=lambda s, t: (s, "x", 1.0, False)), "turn 1: expected 2 rewards, one for each seat"),
    (PAIR._replace(seat=lambda s: 2), "turn 0: expected a seat below 2, got 2"),
]  # fmt: skip


@pytest.mark.parametrize("env, line", BAD, ids=range(len(BAD)))
def test_a_bad_environment_is_named_with_its_row_and_turn(env, line):
    closed = []
    with pytest.raises(ValueError) as found:
        play(rows([2, 2]), [1, 2], env=env._replace(close=closed.append))
    assert line in str(found.value) and "\n" not in str(found.value)
    begun = "turn 0: expected (state" not in line and "turn 0: KeyError" not in line and "below 2" not in line
    assert len(closed) == 6 * begun  # every episode that began


def sleepy(state, text):
    time.sleep(30)


async def sleepy_later(state, text):
    import asyncio

    await asyncio.sleep(30)


@pytest.mark.parametrize("step", [sleepy, sleepy_later])
def test_an_environment_that_hangs_is_interrupted_and_named(step):
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"environment 'chain': row 0, sample 0, turn 1: .*within 0.3 s"):
        play(rows([2]), [1], env=chained(step=step), timeout=0.3)
    assert time.monotonic() - begin < 8


def test_an_engine_goes_on_after_a_bad_environment():
    """Nothing is lost: the same engine and prompts give the same conversations afterwards."""
    spoken = Spoken()
    how = {"n": 2, "sampling": Sampling(max_new=5), "max_turns": 3, "max_tokens": 60}
    given_ = (rows([2, 3]), [1, 2], Renderer(TOK))
    with pytest.raises(ValueError, match="KeyError"):
        collect.play(spoken.engine(), get_strategy(), chained(step=raises), *given_, **how)
    after = collect.play(spoken.engine(), get_strategy(), CHAIN, *given_, **how)
    fresh, _ = play(rows([2, 3]), [1, 2], n=2, max_turns=3, max_tokens=60)
    assert torch.equal(after.rollout.tokens, fresh.rollout.tokens)


def test_steps_that_can_be_awaited_run_at_the_same_time():
    import asyncio

    async def slow(state, text):
        await asyncio.sleep(0.2)
        return chain_step(state, text)

    begin = time.monotonic()
    played, _ = play(rows([1] * 4), [1, 2, 3, 4], env=chained(step=slow), n=5)
    assert time.monotonic() - begin < 2  # one after the other they take 4 s
    plain, _ = play(rows([1] * 4), [1, 2, 3, 4], n=5)
    assert torch.equal(played.rollout.tokens, plain.rollout.tokens)


@pytest.mark.parametrize("prompts, keys, n", [([], [], 1), (rows([1]), [1, 2], 1), (rows([1]), [1], 0)])
def test_prompts_without_keys_are_refused(prompts, keys, n):
    with pytest.raises(ValueError, match="prompts: expected one or more, a key for each, n >= 1"):
        play(prompts, keys, n=n)


def test_the_trainer_scores_conversations_as_they_were_sampled():
    """The log-probs of all turns are those of the whole row, observations in between."""
    lm = tiny.llama(1)
    st = get_strategy()
    apply, state = st.init(lm, rft.optim.adamw(1e-3), sampling=Sampling(max_new=6))
    eng = rft.engine.get_engine(None, tiny.llama(1), TOK)
    played = collect.play(
        eng, st, CHAIN, rows([3, 4]), [1, 2], Renderer(TOK), n=3, sampling=Sampling(max_new=6),
        max_turns=4, max_tokens=60,
    )  # fmt: skip
    r = played.rollout
    assert (played.numbers["turns"] > 1).any()
    scored = st.score(apply, state.params, r, 256).logp
    torch.testing.assert_close(scored, r.logp, atol=2e-5, rtol=0)


def test_observations_carry_no_gradient():
    """Other log-probs on observations change neither loss nor gradient: they are outside of the mask."""
    played, _ = play(rows([3, 4]), [1, 2], speak=words)
    r = played.rollout
    changed = tree.replace(r, logp=torch.where(r.mask, r.logp, -7.0))
    for x in (r, changed):
        exp = rft.experience(x, adv=torch.ones(r.mask.shape), w=rft.weight.token_mean(r.mask))
        pack = rft.packing.pack(exp, range(len(r.tokens)))
        assert pack.mask.sum() == r.mask.sum() and float(pack.w.sum()) == pytest.approx(1.0)
        assert not pack.old_logp[~pack.mask].any() and not pack.adv[~pack.mask].any()
    assert (played.rollout.length - played.rollout.mask.sum(-1) > 3).any()


def test_judged_conversations_can_be_read():
    played, _ = play(rows([2, 3]), [1, 2])
    judged = played.judged()
    assert judged.extra["conversation"] == played.talks and judged.texts == played.texts
    means = rft.reward.means(judged, "eval")
    assert means["eval/turns"] == pytest.approx(float(played.numbers["turns"].mean()))
    assert means["eval/mean"] == pytest.approx(float(played.reward.mean()))


def test_tokens_of_a_conversation_keep_the_experts_of_their_first_turn():
    """The last token of a turn has those of the next one, which reads it; another seat has none."""
    talk = Conversation(prompt=0, sample=0, seat=0, key=0)
    talk.read([3, 4])
    first = torch.tensor([1, 1, 1, 0], dtype=torch.uint8)[:, None, None]
    talk.say([5, 6], [-1.0, -1.0], version=0, cut=False, routing=first)
    talk.read([7])
    again = torch.tensor([2, 2, 2, 2, 2, 0], dtype=torch.uint8)[:, None, None]
    talk.say([8], [-1.0], version=1, cut=False, routing=again)
    silent = Conversation(prompt=0, sample=1, seat=0, key=0)
    silent.read([3, 4])
    played = assembled([talk, silent], [None], ["", ""], ["", ""], seats=1, pad=0, sampling=Sampling())
    assert played.rollout.routing.flatten(1).tolist() == [[1, 1, 1, 2, 2, 0], [0] * 6]
