"""The rollout of the global batch: shares of rows, ranks without prompts, and the law of cuts over ranks."""

import re
from pathlib import Path

import pytest
import ranks
import tiny
import torch

import rft_fn as rft
from rft_fn import collect, engine, rng
from rft_fn.rollout import extend, prefixes
from rft_fn.strategy import StrategyConfig, get_fake_strategy, get_strategy

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16], [17], [18, 19]]
KEYS = [rng.fold_in(0, i) for i in range(len(PROMPTS))]
SAMPLING = rft.Sampling(max_new=9, stop=("12", "+1"))
CUTS = [1, 5, 2, 2, 3, 1, 4, 2, 1, 3]


def listed(rollout):
    """All fields of a rollout, by name."""
    return {name: x for name, x in vars(rollout).items() if x is not None and name != "sampling"}


def every_case(st):
    """What `gather_and_generate` returns for 5, 1 and no prompts, and for samples that are continued."""
    eng = engine.hf(tiny.llama(), tiny.tokenizer(), batch=4)

    def sampled(count, **options):
        of_count = slice(0, count)
        return collect.gather_and_generate(
            eng, st, PROMPTS[of_count], KEYS[of_count], n=2, sampling=SAMPLING, **options
        )

    whole = sampled(5)
    first = sampled(5, max_new=CUTS)
    drawn = first.mask.sum(-1)
    rest = collect.gather_and_generate(
        eng,
        st,
        prefixes(first),
        [(KEYS[b // 2], b % 2) for b in range(10)],
        n=1,
        sampling=SAMPLING,
        max_new=9 - drawn,
        start=drawn.tolist(),
    )
    cases = {"whole": whole, "first": first, "both": extend(first, rest)}
    cases |= {
        "one": sampled(1, max_new=[2, 9], start=[0, 4]),
        "none": sampled(0),
        "nought": sampled(0, max_new=[]),
    }
    refused = {}
    for name, options in {"max_new": {"max_new": [1] * 9}, "start": {"start": [0] * 9 + [-1]}}.items():
        with pytest.raises(engine.BadRequest) as caught:
            sampled(5, **options)
        refused[name] = str(caught.value)
    return {name: listed(x) for name, x in cases.items()}, refused


def on_rank(rank):
    return every_case(get_strategy(StrategyConfig()))


@pytest.fixture(scope="module")
def alone():
    return every_case(get_fake_strategy())


def test_two_ranks_have_what_one_process_has(alone):
    """Each takes its rows' share of limits and starts; some have no prompts, or nobody has any."""
    for cases, refused in ranks.run(2, "test_generate:on_rank", timeout=200):
        assert refused == alone[1]
        assert list(cases) == list(alone[0])
        for name, found in cases.items():
            for field, x in alone[0][name].items():
                assert found[field].dtype == x.dtype, (name, field)
                torch.testing.assert_close(found[field], x, rtol=0, atol=1e-5, msg=f"{name}: {field}")


def test_rows_that_were_cut_and_continued_are_the_uncut_ones(alone):
    whole, first, both = (alone[0][name] for name in ("whole", "first", "both"))
    cut = [b for b, size in enumerate(CUTS) if first["truncated"][b] and size < 9]
    assert len(cut) > 5
    for b in cut:
        size = int(whole["length"][b])
        assert int(both["length"][b]) == size and both["truncated"][b] == whole["truncated"][b]
        assert torch.equal(both["tokens"][b, :size], whole["tokens"][b, :size])
        torch.testing.assert_close(both["logp"][b, :size], whole["logp"][b, :size], rtol=0, atol=1e-5)


def test_no_prompts_are_no_rows(alone):
    for name in ("none", "nought"):
        assert alone[0][name]["tokens"].shape == (0, 0) and alone[0][name]["group"].dtype == torch.long
    assert alone[1]["max_new"] == "max_new: expected one for each row, B = 10, got B = 9"
    assert alone[1]["start"] == "start[9]: expected an integer >= 0, got -1"


@pytest.mark.parametrize("rank", range(4))
def test_a_bad_prompt_has_its_number_of_the_global_batch(rank):
    """Two prompts for each of three ranks, and none for the last; only the engine can encode texts."""
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    st = get_fake_strategy()._replace(rank=rank, world=4)

    def sampled(prompts):
        return collect.gather_and_generate(eng, st, prompts, range(6), n=2, sampling=SAMPLING)

    with pytest.raises(engine.BadRequest, match=r"got none in prompt 3$"):  # the same on every rank
        sampled([[3], [2], [4], [], [5], []])
    texts = ["1+", "", "2+", "", "3+", ""]
    if rank < 3:
        with pytest.raises(engine.BadRequest, match=f"got an empty text in prompt {2 * rank + 1}$"):
            sampled(texts)
    else:
        assert len(sampled(texts).tokens) == 0
    assert eng.status()["alive"]


def test_an_engine_that_cannot_continue_samples_all_the_same():
    """One without the two arguments is not handed them unless they are asked for."""
    asked = []
    eng = engine.hf(tiny.llama(), tiny.tokenizer())

    def generate(prompts, keys, *, n=1, sampling):
        asked.append(len(prompts))
        return eng.generate(prompts, keys, n=n, sampling=sampling)

    own = engine.dead_after_failure(eng._replace(generate=generate))
    st = get_fake_strategy()
    r = collect.gather_and_generate(own, st, PROMPTS, KEYS, n=2, sampling=SAMPLING)
    assert asked == [5] and len(r.tokens) == 10
    idle = st._replace(rank=5, world=6)
    none = collect.gather_and_generate(own, idle, PROMPTS, KEYS, n=2, sampling=SAMPLING)
    assert asked == [5, 0] and none.tokens.shape == (0, 0)  # ranks may have to act together
    with pytest.raises(TypeError, match="max_new"):
        collect.gather_and_generate(own, st, PROMPTS, KEYS, n=2, sampling=SAMPLING, max_new=CUTS)


def test_the_page_runs_as_it_stands():
    """docs/engines.md, whose blocks continue each other."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 3
    found = {}
    exec(compile("\n".join(blocks), "docs/engines.md", "exec"), found)
    assert len(found["cut"]) > 2 and len(found["branches"].tokens) == 4
