"""Media through all that rollouts pass: ranks, steps ahead, budgets, conversations, another process."""

import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import ranks
import tiny
import torch
from sees_and_hears import FAMILIES

import rft_fn as rft
from rft_fn import collect, engine, rng
from rft_fn.collect.engine_worker import name_of
from rft_fn.engine import EngineConfig, prompt_media
from rft_fn.environment import Environment, Renderer, Stepped
from rft_fn.model.placeholders import placeholder_ids
from rft_fn.rollout import prefixes, take
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

SAMPLING = rft.Sampling(max_new=7)
FAMILY = FAMILIES["Qwen2VL"]
TOK = tiny.tokenizer()


def lm():
    return FAMILY.build(torch.float32)


def prompts_of(count, seed=0):
    """Objects like those of data: with an image, without, with two, and so on."""
    found = []
    for i in range(count):
        tensors, ids = FAMILY.sample(["image"] * (i % 3 != 1) * (1 + i % 2), seed=seed + i)
        names = tuple(f"{i}.png" for _ in tensors)
        about = {"text": "x", "index": i, "columns": {}, "messages": None}
        found.append(SimpleNamespace(ids=ids, media=tensors or None, media_names=names, **about))
    return found


def draw(step, count=3):
    return prompts_of(count, seed=10 * step), [rng.fold_in(1, step, i) for i in range(count)]


@pytest.fixture(scope="module")
def eng():
    return engine.hf(lm(), TOK, batch=8)


def same(got, want):
    """Tokens of each row exactly, media to the bit, log-probs up to rounding."""
    assert got.length.tolist() == want.length.tolist()
    for b, size in enumerate(want.length.tolist()):
        assert got.tokens[b, :size].tolist() == want.tokens[b, :size].tolist()
        torch.testing.assert_close(got.logp[b, :size], want.logp[b, :size], rtol=0, atol=3e-6)
    same_media(got.media, want.media)


def same_media(got, want):
    assert got.of.tolist() == want.of.tolist()
    assert got.tensors.keys() == want.tensors.keys()
    for name, x in want.sequences().items():
        assert torch.equal(got.sequences()[name], x)


# ---------------------------------------------------------------------------------- another process


def test_an_engine_in_its_own_process_samples_the_same(eng):
    """Media get there, and the rollout's are those of this process: none come back."""
    own = engine.get_engine(EngineConfig(process=True, batch=8), lm(), TOK)
    try:
        prompts, keys = draw(0)
        want = eng.generate(prompts, keys, n=2, sampling=SAMPLING)
        got = own.generate(prompts, keys, n=2, sampling=SAMPLING)
        same(got, want)
        assert (own.score(got) - want.logp).abs().max() < 3e-6
        cut = take(got, [0, 4])
        longer = own.generate(prefixes(cut, cut.mask.int().argmax(-1)), [1, 2], sampling=SAMPLING)
        assert longer.media.of.tolist() == [0, 1]
        with pytest.raises(engine.BadRequest, match="in prompt 1"):
            own.generate([prompts[1], prompts[0].ids], keys[:2], sampling=SAMPLING)
        same(own.generate(prompts, keys, n=2, sampling=SAMPLING), want)
    finally:
        own.close()


def test_media_are_sent_once():
    """Rows of one prompt share them; a view brings nothing else along; media that nobody reads stay here."""
    prompt = prompts_of(1)[0]
    large = torch.randn(10_000, 96)
    shared = {"pixel_values": large[:16], "image_grid_thw": torch.tensor([[1, 4, 4]])}
    rows = [SimpleNamespace(ids=[*prompt.ids, t], media=shared, sampled=None) for t in range(8)]
    sizes = [len(pickle.dumps(prompt_media.to_send(rows[:n]))) for n in (1, 8)]
    assert sizes[0] < 2 * 16 * 96 * 4
    assert sizes[1] < sizes[0] + 7 * 1000
    sent = pickle.loads(pickle.dumps(prompt_media.to_send(rows)))
    assert torch.equal(sent[7].media["pixel_values"], large[:16]) and sent[7].ids == rows[7].ids
    assert prompt_media.to_send([SimpleNamespace(ids=[1, 2], media=None), [3]]) == [[1, 2], [3]]


def test_a_checkpoint_of_rollouts_ahead_brings_their_media_back(eng):
    """They are left out of it, as numbers of one rank would be; a resumed run has them from its prompts."""
    st = get_strategy()
    calls = collect.EngineWorker(lambda: engine.hf(lm(), TOK, batch=8))
    samples = collect.AsyncSampler(calls.engine(), st, calls=calls)
    prompts, keys = draw(3)
    samples.begin(prompts, keys, n=2, sampling=SAMPLING)
    saved = samples.save()
    assert [x["rollout"].media for x in saved] == [None]
    want = eng.generate(prompts, keys, n=2, sampling=SAMPLING)
    same(samples.generate(prompts, keys, n=2, sampling=SAMPLING), want)
    samples.close()
    resumed = collect.AsyncSampler(eng, st)
    same(resumed.generate(prompts, keys, n=2, sampling=SAMPLING, saved=saved), want)


def test_partial_rollouts_keep_their_media(eng):
    """Responses grow by two tokens a step, and are those that would have been sampled at once."""
    waiting, found = None, {}
    for step in range(4):
        done = collect.sample_partial(
            eng.generate, draw, step, n=2, sampling=SAMPLING, budget=2, waiting=waiting
        )
        waiting = done.waiting
        if waiting is not None:
            assert waiting.rollout.media is None
        for i, prompt in enumerate(done.prompts):
            own = take(done.rollout, (done.rollout.group == i).nonzero().flatten())
            found[tuple(prompt.ids)] = own
    grown = 0
    for step in range(4):
        prompts, keys = draw(step)
        for prompt, key in zip(prompts, keys):
            if tuple(prompt.ids) not in found or prompt.media is None:
                continue
            own = found[tuple(prompt.ids)]
            same(own, eng.generate([prompt], [key], n=2, sampling=SAMPLING))
            grown += int(own.mask.sum(-1).max()) > 2
    assert grown >= 2


def talk(env, prompts, eng, **limits):
    keys = [rng.fold_in(5, i) for i in range(len(prompts))]
    how = {"n": 2, "sampling": rft.Sampling(max_new=3), "max_turns": 3, "max_tokens": 120} | limits
    return collect.play(eng, get_fake_strategy(), env, prompts, keys, Renderer(TOK), **how)


def echo(state, response):
    return Stepped(state + 1, "7=", 1.0, state == 2)


def test_a_conversation_keeps_the_media_of_its_prompt(eng):
    """Turn by turn its log-probs are those of the whole row, which `score` reads with its image."""
    played = talk(Environment("echo", lambda row, key: (0, None), echo), prompts_of(3), eng)
    rollout = played.rollout
    assert rollout.media.of.tolist() == [0, 0, -1, -1, 1, 1]
    assert (played.numbers["turns"] == 3).any()
    assert (eng.score(rollout) - rollout.logp).abs().max() < 5e-6
    blind = rft.tree.replace(rollout, media=None, tokens=torch.where(rollout.tokens == 50, 9, rollout.tokens))
    assert (eng.score(blind) - rollout.logp).abs().max() > 0.01  # the image matters


def test_a_conversation_ends_before_a_placeholder_is_read():
    """Nothing stands behind one that the policy sampled, with and without media."""
    likely = lm()
    place = sorted(placeholder_ids(likely.config))
    with torch.no_grad():
        head = likely.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.clone())
        head.weight[place] *= 4
    eng = engine.hf(likely, TOK, batch=8)
    played = talk(Environment("echo", lambda row, key: (0, None), echo), prompts_of(3), eng, n=6)
    rollout = played.rollout
    ended = torch.isin(rollout.tokens, torch.tensor(place)) & rollout.mask
    assert ended.any(-1).sum() > 3
    last = torch.nn.functional.one_hot(rollout.length - 1, rollout.tokens.shape[1]).bool()
    observed = ended & ~last
    cut = ended.any(-1)
    # only what an environment had said by then may follow, unread
    assert not (observed & ~last).any() or not rollout.mask[observed.any(-1)].flip(-1)[:, 0].any()
    assert rollout.truncated[cut & (played.numbers["turns"] < 3)].any()
    assert (eng.score(rollout) - rollout.logp).abs().max() < 1e-5


def test_an_environment_that_writes_the_prompt_anew_refuses_media(eng):
    env = Environment("telling", lambda row, key: (0, "5="), echo)
    with pytest.raises(ValueError, match="environment 'telling': row 0: expected a prompt without media"):
        talk(env, prompts_of(1), eng)


def everything(st):
    """A gathered rollout, one that continues some of its rows on other ranks, partial ones, and one ahead."""
    eng = engine.hf(lm(), TOK, batch=8)
    generate = partial(collect.gather_and_generate, eng, st)
    prompts, keys = prompts_of(4), [rng.fold_in(2, i) for i in range(4)]
    first = generate(prompts, keys, n=2, sampling=SAMPLING, max_new=[2] * 8)
    chosen = take(first, [5, 4, 1, 0])  # of ranks 1 and 0, continued by 0 and 1
    begun = [ids + [9] for ids in prefixes(chosen, chosen.mask.int().argmax(-1))]  # noqa: RUF005, keeps media
    more = generate(begun, [3, 4, 5, 6], n=1, sampling=SAMPLING)
    how = {"n": 2, "sampling": SAMPLING, "budget": 2, "strategy": st}
    done = collect.sample_partial(generate, draw, 0, **how)
    later = collect.sample_partial(generate, draw, 1, waiting=done.waiting, **how)
    saved = [{"name": name_of(keys, 2, SAMPLING), "rollout": rft.tree.replace(first, media=None)}]
    ahead = collect.AsyncSampler(eng, st).generate(prompts, keys, n=2, sampling=SAMPLING, saved=saved)
    found = {"first": first, "more": more, "done": done.rollout, "later": later.rollout, "ahead": ahead}
    return {name: packed(st, x) for name, x in found.items()}


def packed(st, rollout):
    """(tokens, numbers of media, the packs' media of this rank by row) of a rollout."""
    exp = rft.experience(
        rollout, adv=torch.zeros(len(rollout.tokens)), w=rollout.mask / max(int(rollout.mask.sum()), 1)
    )
    rows = {}
    for pack in st.shard(exp, 200):
        for k, row in enumerate(pack.rows):
            if int(pack.media.of[k]) >= 0:
                rows[row] = {name: x.clone() for name, x in pack.media.take([k]).tensors.items()}
    return rollout.tokens, rollout.length, rollout.media.of, rollout.media.rows, rows


def on_rank(rank):
    return everything(get_strategy(StrategyConfig()))


def test_two_ranks_have_the_media_that_their_packs_need():
    """Rows and numbers as on one process, whichever rank continues a row."""
    alone = everything(get_fake_strategy())
    both = ranks.run(2, "test_media_rollouts:on_rank")
    for name, (tokens, length, of, counts, rows) in alone.items():
        seen = {}
        for found in both:
            got = found[name]
            for b, size in enumerate(length.tolist()):
                assert got[0][b, :size].tolist() == tokens[b, :size].tolist(), name
            assert got[2].tolist() == of.tolist(), name
            assert {k: x.tolist() for k, x in got[3].items()} == {k: x.tolist() for k, x in counts.items()}
            seen |= got[4]
        assert seen.keys() == rows.keys() and len(seen) >= 2, name
        for row, tensors in rows.items():
            assert all(torch.equal(seen[row][k], x) for k, x in tensors.items())
