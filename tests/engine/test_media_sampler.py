"""Sampling by models that see and hear: the trainer's log-probs, in any company, whole or in pieces."""

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import tiny
import torch
from sees_and_hears import FAMILIES

import rft_fn as rft
from rft_fn import engine, model, packing, rng, weight
from rft_fn.engine import prompt_media, requests
from rft_fn.engine.hf.probe import find_cache_support
from rft_fn.engine.hf.row_batch import CacheSupport
from rft_fn.engine.hf.sampler import Sampler
from rft_fn.engine.prompt_media import Sent
from rft_fn.engine.requests import Stop
from rft_fn.model.placeholders import placeholder_ids

pytestmark = pytest.mark.slow

KEYS = [rng.fold_in(0, i) for i in range(5)]
SAMPLING = rft.Sampling(max_new=7)


def prompts_of(family, seed=0):
    """One medium, none, two, one of each kind, and words alone, as objects with ids and media."""
    kinds = family.kinds
    rows = [kinds[:1], [], kinds[:1] * 2, list(kinds), []]
    found = []
    for i, row in enumerate(rows):
        tensors, ids = family.sample(row, seed=seed + i)
        found.append(Sent(ids, tensors, None) if tensors else ids)
    return found


def trained(lm, rollout, sampling=SAMPLING):
    """[B, S]: the log-probs of a rollout by the trainer."""
    st = rft.strategy.get_fake_strategy()
    apply, params = st.bind(copy.deepcopy(lm), sampling=sampling)
    exp = rft.experience(rollout, adv=torch.zeros(len(rollout.tokens)), w=weight.token_mean(rollout.mask))
    packs = st.shard(exp, 128)
    return packing.unpack(model.score(apply, params, packs), packs, exp.w)


@cache
def sampled(name):
    """(model, engine, prompts, their rollout) of a family."""
    lm = FAMILIES[name].build(torch.float32)
    eng = engine.hf(copy.deepcopy(lm), tiny.tokenizer(), batch=4)
    prompts = prompts_of(FAMILIES[name])
    return lm, eng, prompts, eng.generate(prompts, KEYS, n=3, sampling=SAMPLING)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_the_trainers(name):
    """Left padding, media in some rows, n samples of one prefill; by the trainer's packs and by `score`."""
    lm, eng, _, rollout = sampled(name)
    assert (trained(lm, rollout) - rollout.logp).abs().max() < tiny.logp_rounding(lm)
    assert (eng.score(rollout) - rollout.logp).abs().max() < tiny.logp_rounding(lm)
    assert rollout.logp[rollout.mask].min() < -0.1  # there is something to agree about


@pytest.mark.parametrize("name", FAMILIES)
def test_in_float64(name):
    lm = FAMILIES[name].build(torch.float64)
    prompts = prompts_of(FAMILIES[name])
    ids = requests.token_ids(prompts)
    shown = prompt_media.read(prompts, ids)
    batching = find_cache_support(lm, 0)
    assert batching.padded or lm.config.model_type == "paligemma"  # which reads a prompt both ways
    stop = Stop(None, requests.end_tokens(lm, tiny.tokenizer()), ())
    sampler = Sampler(lm, batching, SAMPLING, stop, 0, 64)
    with torch.no_grad():
        found = sampler.responses(ids, shown, requests.Request(prompts, KEYS, 2, SAMPLING).rows())
    rollout = requests.assemble(ids, found, pad=0, version=0, media=prompt_media.tensors(shown))
    want = trained(lm, rollout)
    got = torch.tensor([p for row in found for p in row.logp], dtype=torch.float64)
    assert want.dtype == torch.float64
    assert (want[rollout.mask] - got).abs().max() < 1e-10


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_belong_to_their_keys(name):
    """Alone and with another batch size, the same tokens; and all samples read one copy of the media."""
    _, eng, prompts, rollout = sampled(name)
    for i, prompt in enumerate(prompts):
        alone = eng.generate([prompt], KEYS[i : i + 1], n=3, sampling=SAMPLING)
        for j in range(3):
            want = rollout.tokens[3 * i + j, : rollout.length[3 * i + j]]
            assert alone.tokens[j, : alone.length[j]].tolist() == want.tolist()
    owners = [0, -1, 1, 2, -1]
    assert rollout.media.of.tolist() == [owner for owner in owners for _ in range(3)]
    for name, x in prompts[2].media.items():
        assert int(rollout.media.count(name)[6]) == len(x)


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_are_the_whole(name):
    """Cut after two tokens and continued: with the prompt's media, and as a prefix of the rollout."""
    lm, eng, prompts, rollout = sampled(name)
    bound = tiny.logp_rounding(lm)
    begun = eng.generate(prompts, KEYS, n=3, sampling=SAMPLING, max_new=[2] * 15)
    rows = begun.truncated.nonzero().flatten().tolist()
    short = rft.rollout.take(begun, rows)
    how = {"sampling": SAMPLING, "max_new": [SAMPLING.max_new - 2] * len(rows), "start": [2] * len(rows)}
    keys = [(KEYS[b // 3], b % 3) for b in rows]
    plain = [Sent(ids.copy(), getattr(ids, "media", {}), None) for ids in rft.rollout.prefixes(short)]
    for prefixes in (rft.rollout.prefixes(short), plain):
        longer = rft.rollout.extend(short, eng.generate(prefixes, keys, **how))
        for i, b in enumerate(rows):
            size = int(rollout.length[b])
            assert longer.tokens[i, :size].tolist() == rollout.tokens[b, :size].tolist()
            torch.testing.assert_close(longer.logp[i, :size], rollout.logp[b, :size], rtol=0, atol=bound)
        assert longer.media.of.tolist() == short.media.of.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_way_to_batch_is_right(name):
    """Whatever the probe may choose: rows of one length, one row, and no cache at all; seen seldom too."""
    lm, _, prompts, rollout = sampled(name)
    bound = tiny.logp_rounding(lm)
    ids = requests.token_ids(prompts)
    shown = prompt_media.read(prompts, ids)
    best = find_cache_support(lm, 0)
    ends = requests.end_tokens(lm, tiny.tokenizer())
    best = best._replace(joins=False, shares=False)
    even, single = best._replace(padded=False), best._replace(padded=False, single=True)
    for batching, every in (
        (even, 1),
        (single, 1),
        (CacheSupport(None), 1),
        (best, 4),
        (CacheSupport(None), 4),
    ):
        sampler = Sampler(lm, batching, SAMPLING, Stop(None, ends, ()), 0, 64, every)
        with torch.no_grad():
            found = sampler.responses(ids, shown, requests.Request(prompts, KEYS, 3, SAMPLING).rows())
        for b, response in enumerate(found):
            assert response.tokens == rollout.tokens[b][rollout.mask[b]].tolist()
            want = rollout.logp[b][rollout.mask[b]]
            torch.testing.assert_close(torch.tensor(response.logp), want, rtol=0, atol=bound)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sampled_placeholder_ends_a_response(name):
    """It is the row's last token, and the trainer's log-probs are exact for it too."""
    lm, _, prompts, _ = sampled(name)
    places = placeholder_ids(lm.config)
    assert places
    likely = copy.deepcopy(lm)
    with torch.no_grad():
        head = likely.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.clone())  # which may be tied
        head.weight[sorted(places)] *= 3
    eng = engine.hf(copy.deepcopy(likely), tiny.tokenizer(), batch=8)
    rollout = eng.generate(prompts, KEYS, n=6, sampling=SAMPLING)
    last = rollout.tokens[torch.arange(30), rollout.length - 1]
    ended = torch.isin(last, torch.tensor(sorted(places)))
    assert ended.sum() > 3
    assert not rollout.truncated[ended].any()
    inside = rollout.mask.clone()
    inside[torch.arange(30), rollout.length - 1] = False
    assert not torch.isin(rollout.tokens[inside], torch.tensor(sorted(places))).any()
    assert (trained(likely, rollout) - rollout.logp).abs().max() < tiny.logp_rounding(likely)
    assert (eng.score(rollout) - rollout.logp).abs().max() < tiny.logp_rounding(likely)


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", FAMILIES)
def test_media_that_do_not_fit_their_prompt_are_refused(name):
    """By the prompt's number, before anything ran; the engine lives on."""
    lm, eng, prompts, rollout = sampled(name)
    tensors, ids = prompts[0].media, prompts[0].ids
    place = next(x for x in ids if x in placeholder_ids(lm.config))
    bad = {
        "prompts: expected text alone without media": ids,
        "prompts: expected placeholders for its media": Sent([2, 3, 4], tensors, None),
    }
    if any(name.endswith("grid_thw") for name in tensors):
        more = Sent([*ids, place], tensors, None)
        bad["prompts: expected the placeholders of its media, got others"] = more
    for message, prompt in bad.items():
        with pytest.raises(requests.BadPrompt, match=message) as error:
            eng.generate([prompts[1], prompt], KEYS[:2], sampling=SAMPLING)
        assert "in prompt 1" in str(error.value)
    long = Sent([*ids, *[2] * 250], tensors, None)
    with pytest.raises(requests.BadPrompt, match=r"window of 256 tokens.*in prompt 0"):
        eng.generate([long], KEYS[:1], sampling=SAMPLING)
    again = eng.generate(prompts, KEYS, n=3, sampling=SAMPLING)
    assert torch.equal(again.tokens, rollout.tokens)


def test_a_text_model_takes_no_media():
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    prompt = Sent([5, 6], {"pixel_values": torch.zeros(4, 3)}, None)
    message = r"text alone for a text model, got media \(pixel_values\) in prompt 1"
    with pytest.raises(requests.BadPrompt, match=message):
        eng.generate([[3, 4], prompt], KEYS[:2], sampling=SAMPLING)


@pytest.mark.parametrize("names", [(), ("pixel_values",)])
def test_an_engine_is_asked_about_media_where_the_first_prompts_have_some(names, monkeypatch):
    asked, prompts = [], [SimpleNamespace(media_names=()), SimpleNamespace(media_names=names)]
    monkeypatch.setattr(rft.data, "take", lambda *args: (prompts, None))
    monkeypatch.setattr(engine, "check_media", lambda *args: asked.append(args))
    rft.run.check_engine_media(rft.strategy.get_strategy(), "tiny", None)
    assert len(asked) == len(names)


class Torn:
    """A prompt whose image has gone."""

    ids = (5, 6)

    @property
    def media(self):
        raise ValueError("squares.csv:3: image a.png: no such file")


def test_media_that_cannot_be_read_are_told_with_the_prompt():
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    with pytest.raises(requests.BadPrompt, match=r"got squares.csv:3: image a.png: no such file in prompt 1"):
        eng.generate([[3, 4], Torn()], KEYS[:2], sampling=SAMPLING)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2Audio"])
def test_weights_of_towers_have_to_arrive(name):
    """All of them, or the load names the tensor; then the next samples are the new weights'."""
    lm, other = (FAMILIES[name].build(torch.float32, seed=s) for s in (0, 1))
    prompts = prompts_of(FAMILIES[name])
    eng = engine.hf(copy.deepcopy(lm), tiny.tokenizer())
    pairs = dict(other.named_parameters())
    delivered = eng.load(pairs.items(), version=3)
    assert delivered.tensors == len(pairs) and delivered.version == 3
    rollout = eng.generate(prompts, KEYS, n=2, sampling=SAMPLING)
    assert (trained(other, rollout) - rollout.logp).abs().max() < tiny.logp_rounding(other)
    tower = next(x for x in pairs if "visual" in x or "audio_tower" in x)
    missing = {x: w for x, w in pairs.items() if x != tower}
    with pytest.raises(ValueError, match=tower.replace(".", r"\.")):
        eng.load(missing.items(), version=4)
