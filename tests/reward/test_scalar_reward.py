"""Scalar reward models as rewards: the rows that they read, their heads, and where they come from."""

from dataclasses import dataclass
from functools import partial

import chats
import numpy as np
import pytest
import ref_rewards
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn import data, engine, model, packing, reward
from rft_fn.reward.scalar_model import reads_alike, steps_of
from rft_fn.run import load_rewards, options
from rft_fn.run.reward_task import judges_here, reward_modules
from rft_fn.strategy import get_strategy
from rft_fn.types import TokenOut

PROMPTS = [data.Prompt([3, 4], "12", {"answer": "12"}, 0), data.Prompt([5], "3", {"answer": "3"}, 1)]


@dataclass(frozen=True)
class Config(options.Shaping, options.Prompts, options.Model):
    """The options that rewards of models are loaded by."""


def rollout_of(tokenizer, said, truncated):
    """Rows of prompt and response; those that are not truncated have an end token."""
    rows = []
    for i, (text, cut) in enumerate(zip(said, truncated, strict=True)):
        end = [] if cut else [tokenizer.eos_token_id]
        rows.append((PROMPTS[i // 2].ids, tokenizer.encode(text, add_special_tokens=False) + end))
    exp = packing.supervised(rows)
    return tiny.rollout(exp, torch.arange(len(rows)) // 2, truncated)


def rows_of(exp):
    """The ids that are scored, without the appended target."""
    return [row[: n - 1].tolist() for row, n in zip(exp.tokens, exp.length.tolist(), strict=True)]


class Other:
    """A tokenizer with other ids: the tiny one's, 100 higher."""

    eos_token_id = 7
    chat_template = None
    asked: list = []  # noqa: RUF012

    def get_vocab(self):
        return {"a": 100}

    def encode(self, text, add_special_tokens=True, split_special_tokens=False):
        ids = tiny.tokenizer().encode(text, add_special_tokens=add_special_tokens)
        self.asked.append((text, split_special_tokens))
        return [i + 100 for i in ids]


def test_the_ids_of_the_rollout_are_read_where_the_tokenizer_makes_the_same():
    tokenizer = tiny.tokenizer()
    rollout = rollout_of(tokenizer, ["1", "22", "3", "4"], [False, True, False, False])
    rows = rows_of(reward.Reading(tokenizer).rows(rollout, PROMPTS, tokenizer))
    expected = [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.length.tolist(), strict=True)]
    assert rows == expected
    end = tokenizer.eos_token_id
    assert [row[-1] == end for row in rows] == [True, False, True, True]


def test_a_sampled_response_ends_as_it_does_in_training():
    """With the template's end of a turn, also where the policy sampled another end."""
    tokenizer = chats.tokenizer(chats.CHATML)
    said = [tokenizer.encode(f"4{end}") for end in ("<|im_end|>", "<eos>")]
    taught = data.pairs_from_rows([{"prompt": "2+2", "chosen": "4", "rejected": "5"}], tokenizer).prompt(0)
    prompt = data.from_rows([{"question": "2+2"}], tokenizer).prompt(0)
    exp = packing.supervised([(prompt.ids, ids) for ids in said])
    rows = rows_of(reward.Reading(tokenizer).rows(tiny.rollout(exp), [prompt], tokenizer))
    assert rows == [taught.chosen.ids] * 2


def test_another_tokenizer_reads_the_text_with_an_end_unless_it_was_truncated():
    tokenizer, other = tiny.tokenizer(), Other()
    other.asked.clear()
    rollout = rollout_of(tokenizer, ["1", "22", "3", "4"], [False, True, False, False])
    rows = rows_of(reward.Reading(other).rows(rollout, PROMPTS, tokenizer))

    def ids(text):
        return [i + 100 for i in tokenizer.encode(text, add_special_tokens=False)]

    assert rows[:2] == [[*ids("12"), *ids("1"), 7], [*ids("12"), *ids("22")]]
    assert rows[2:] == [[*ids("3"), *ids("3"), 7], [*ids("3"), *ids("4"), 7]]
    assert [split for text, split in other.asked if text in ("1", "22", "4")] == [True, True, True]
    assert not reads_alike(other, tokenizer) and reads_alike(tokenizer, model.load_tokenizer("tiny"))


def test_tokenizers_of_other_vocabularies_are_told_apart():
    a, b = Other(), Other()
    assert reads_alike(a, b)
    b.get_vocab = lambda: {"a": 100, "b": 101}
    assert not reads_alike(a, b)
    b.get_vocab = a.get_vocab
    b.chat_template = "{{ messages }}"
    assert not reads_alike(a, b)


def test_a_row_beyond_the_window_is_an_error_that_names_it():
    tokenizer = tiny.tokenizer()
    rollout = rollout_of(tokenizer, ["1", "22222"], [False, False])
    with pytest.raises(ValueError, match="expected at most 5 tokens, its window, got 8 of row 1"):
        reward.Reading(tokenizer, window=5).rows(rollout, PROMPTS[:1], tokenizer)


def test_heads_are_calibrated_and_share_one_forward():
    tokenizer = tiny.tokenizer()
    rollout = rollout_of(tokenizer, ["1", "22", "3", "4"], [False, True, False, False])
    calls = []

    def score(rows, budget):
        calls.append(budget)
        raw = torch.stack([rows.length.float(), -rows.length.float()], -1)
        return TokenOut(logp=rows.old_logp, score=rows.mask[..., None] * raw[:, None])

    heads = (model.Head("long", shift=2.0, scale=4.0), model.Head("short"))
    long = reward.scalar(score, heads, reading=reward.Reading(tokenizer), head="long", budget=9)
    both = reward.weighted(long=(long, 1.0), short=(long.head("short"), 0.5))
    judged = reward.judge(both, rollout, PROMPTS, tokenizer)
    length = (rollout.length.float() + 1).view(2, 2)  # with the appended target
    assert judged.parts["long"].equal((length - 2) / 4) and judged.parts["short"].equal(-length)
    assert calls == [9]
    reward.judge(both, rollout_of(tokenizer, ["1", "2"], [False, False]), PROMPTS[:1], tokenizer)
    assert calls == [9, 9]


def test_a_head_that_is_not_there_and_one_that_is_not_chosen_are_errors():
    heads = (model.Head("a"), model.Head("b"))
    for head in ("", "c"):
        with pytest.raises(ValueError, match=f"head: expected one of a, b, got {head!r}"):
            reward.scalar(None, heads, reading=reward.Reading(tiny.tokenizer()), head=head)


@given(text=st.text("ab\n ", max_size=12), separator=st.sampled_from(["\n", "\n\n", "ab", "", None]))
def test_steps_are_the_text_and_end_with_what_separates_them(text, separator):
    steps = steps_of(text, separator)
    assert "".join(steps) == text and len(steps) >= 1
    if separator:
        assert all(step.endswith(separator) for step in steps[:-1])
        bare = [step.replace(separator, "") for step in steps]
        assert len(steps) == 1 or all(bare)  # two separators in a row end one step
        assert sum(map(bool, text.split(separator))) in (len(steps), 0)
    elif separator == "":
        assert steps == (list(text) or [""])


@pytest.mark.parametrize("end", ["<|im_end|>", "<eos>"])
@pytest.mark.parametrize("separator", ["\n", ""])
def test_steps_are_read_as_they_were_learned(separator, end):
    """The ids and the ends of the rows of training, whatever tokens the policy has sampled."""
    tokenizer = chats.tokenizer(chats.CHATML, end=end)
    texts = [["one", "and two", "3"], ["4"]] if separator else [["a", "b", "c"], ["d"]]
    prompts = [data.Prompt([1], question, {}, i) for i, question in enumerate(("1+1?", "2?"))]
    columns = [
        {"prompt": p.text, "completions": parts, "labels": [1.0] * len(parts)}
        for p, parts in zip(prompts, texts, strict=True)
    ]
    taught = data.reasoning_steps.steps_from_rows(
        columns, tokenizer, separator=separator, template="{prompt}"
    )
    items = [taught.prompt(i) for i in range(2)]

    said = [[*tokenizer.encode(separator.join(parts)), tokenizer.eos_token_id] for parts in texts]
    exp = packing.supervised([(p.ids, ids) for p, ids in zip(prompts, said, strict=True)])
    rollout = tiny.rollout(exp, [0, 1])
    rows = reward.Reading(tokenizer, separator=separator).rows(rollout, prompts, tokenizer)
    assert rows_of(rows) == [item.response.ids for item in items]
    ends = [(row.nonzero()[:, 0] - 1).tolist() for row in rows.mask]
    assert ends == [list(item.ends) for item in items] and len(ends[0]) == 3


def test_a_truncated_response_ends_in_the_middle_of_its_step_and_an_empty_one_at_the_prompt():
    tokenizer = tiny.tokenizer()
    rollout = rollout_of(tokenizer, ["12", "", "3"], [True, True, False])
    rows = reward.Reading(tokenizer, separator="").rows(rollout, PROMPTS, tokenizer)
    asked = [len(tokenizer.encode(p.text, add_special_tokens=False)) for p in PROMPTS]
    ends = [(row.nonzero()[:, 0] - 1).tolist() for row in rows.mask]
    assert ends == [[asked[0], asked[0] + 1], [asked[0] - 1], [asked[1] + 1]]


@pytest.mark.parametrize("steps", ["last", "min", "product"])
def test_the_reward_of_steps_is_its_definition(steps):
    tokenizer = tiny.tokenizer()
    rollout = rollout_of(tokenizer, ["123", "4", "55", "6"], [False, True, False, False])
    raw = torch.randn(4, 12, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    asked = []

    def score(rows, budget):
        asked.append(rows)
        found = raw[:, : rows.tokens.shape[1]]
        return TokenOut(logp=rows.old_logp, score=torch.where(rows.mask[..., None], found, 0))

    heads = (model.Head("a", shift=0.5, scale=2.0), model.Head("b"))
    how = {"reading": reward.Reading(tokenizer, separator=""), "head": "a", "steps": steps}
    a = reward.scalar(score, heads, **how)
    found = [fn(rollout, PROMPTS, tokenizer).double() for fn in (a, a.head("b"))]
    ((rows,), scale, shift) = asked, (2.0, 1.0), (0.5, 0.0)
    if steps == "product":
        scale, shift = (1.0, 1.0), (0.0, 0.0)
    for h in range(2):
        own = (raw[:, : rows.tokens.shape[1], h] - shift[h]) / scale[h]
        want = getattr(ref_rewards, f"steps_{steps}")(own.tolist(), rows.mask.tolist())
        np.testing.assert_allclose(found[h], want, rtol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A reward model with two heads."""
    path = tmp_path_factory.mktemp("models") / "rm"
    made = model.load_reward("tiny", new=True, heads=("a", "b"))
    torch.manual_seed(0)
    torch.nn.init.normal_(made.score.weight)
    made.with_calibration([model.Head("a", 1.0, 2.0), model.Head("b")])
    model.save_reward(path, made)
    model.load_tokenizer("tiny").save_pretrained(path)
    return str(path)


def test_a_folder_is_a_reward_by_its_heads_and_loaded_once(folder, monkeypatch):
    loads = []
    load = model.load_reward

    def counted(*args, **how):
        loads.append(how.get("meta"))
        return load(*args, **how)

    monkeypatch.setattr(model, "load_reward", counted)
    st = get_strategy()
    specs = [f"model:{folder}:a=0.5", f"model:{folder}:b(budget=64)", "exact=0"]
    score = load_rewards(specs, Config(), st)
    assert list(score.components) == ["a", "b", "exact"] and loads == [True]
    assert len(reward_modules(score)) == 1

    # the scores are those of the model alone
    tokenizer = model.load_tokenizer("tiny")
    rollout = rollout_of(tokenizer, ["12", "22", "3", "4"], [False, True, False, False])
    judged = reward.judge(score, rollout, PROMPTS, tokenizer)
    assert loads == [True, False]
    whole = load(folder)
    rows = packing.scored(
        [row[:n].tolist() for row, n in zip(rollout.tokens, rollout.length.tolist(), strict=True)]
    )
    apply, params = st.bind(whole)
    raw = model.final_scores(partial(st.score, apply, params, fields=("score",))(rows, 1024).score, rows.mask)
    torch.testing.assert_close(judged.parts["a"].flatten(), (raw[:, 0] - 1) / 2)
    torch.testing.assert_close(judged.parts["b"].flatten(), raw[:, 1])
    torch.testing.assert_close(judged.reward, 0.5 * judged.parts["a"] + judged.parts["b"])

    # the heads have one forward, whose budget is that of either
    with pytest.raises(ValueError, match=r"budget: expected one for all heads of .*, got 64 and 32"):
        load_rewards([f"model:{folder}:a(budget=32)", f"model:{folder}:b(budget=64)"][::-1], Config(), st)

    # steps are read by a forward of their own, by the same weights
    by_steps = load_rewards(
        [f"model:{folder}:a(steps='{steps}',separator='')" for steps in ("min", "last")], Config(), st
    )
    found = reward.judge(by_steps, rollout, PROMPTS, tokenizer).parts
    assert len(reward_modules(by_steps)) == 1 and len(found) == 2
    least, last = found.values()
    assert (least <= last + 1e-5).all() and (least < last - 1e-3).any()

    # a part of weight 0 is computed, and logged
    assert judged.parts["exact"].tolist() == [[1, 0], [1, 0]]
    assert reward.means(judged, "reward")["reward/exact"] == 0.5


def test_a_folder_that_is_no_reward_model_is_one_line(folder, tmp_path):
    model.save(tmp_path / "lm", model.load("tiny"), model.load_tokenizer("tiny"))
    st = get_strategy()
    lines = {
        f"model:{tmp_path / 'lm'}": "expected a model with heads, got one without",
        f"model:{folder}": "expected model:FOLDER:HEAD, with one of its heads a, b, got none",
        f"model:{folder}:c": "head: expected one of a, b, got 'c'",
        f"model:{folder}:a(budget=0)": "budget: expected a whole number above 0, got 0",
        f"model:{folder}:a(budget='x')": "budget: expected a whole number above 0, got 'x'",
        f"model:{folder}:a(budgte=3)": "unexpected keyword argument 'budgte'",
        f"model:{folder}:a(steps='worst')": "steps: expected one of last, min, product, got 'worst'",
        f"model:{folder}:a(separator='x')": "separator: expected steps beside it, as steps='min', got 'x'",
        f"model:{folder}:a(steps='min',separator=2)": "separator: expected text, got 2",
        "model:": "expected model:TARGET",
        f"judge:{folder}": "expected a language model, got .*model.load_reward loads it",
    }
    for spec, line in lines.items():
        with pytest.raises(ValueError, match=line) as error:
            load_rewards([spec], Config(), st)
        assert str(error.value).startswith(f"reward {spec!r}: ") and "\n" not in str(error.value)


def test_the_options_have_vetoes(folder):
    cfg = Config(reward_veto=("exact<1=-3",))
    score = load_rewards([f"model:{folder}:a", "exact=0"], cfg, get_strategy())
    assert score.vetoes == (reward.Veto("exact", 1.0, -3.0),)
    with pytest.raises(ValueError, match="veto: expected one of exact, got 'nope'"):
        load_rewards(["exact"], Config(reward_veto=("nope<1",)), get_strategy())


def test_the_check_before_a_run_scores_made_up_responses_by_the_model(folder):
    from rft_fn import collect

    st = get_strategy()
    score = load_rewards([f"model:{folder}:a", "exact=0"], Config(), st)
    tokenizer = model.load_tokenizer("tiny")
    checked = collect.check_reward(st, score, PROMPTS, tokenizer=tokenizer)
    assert not checked["answer"].parts["a"].equal(checked["garbage"].parts["a"])
    said = rollout_of(tokenizer, ["12", "12", "3", "3"], [False] * 4)
    judged = reward.judge(score, said, PROMPTS, tokenizer)
    torch.testing.assert_close(checked["answer"].parts["a"], judged.parts["a"][:, 0])
    with pytest.raises(ValueError, match=r"expected prompts .* and their tokenizer"):
        collect.check_reward(st, score, PROMPTS)


def test_judges_of_one_folder_share_an_engine_and_those_on_servers_do_not(monkeypatch):
    """Two questions to one model: its weights are loaded once. Another engine is another one."""
    built = []
    get_engine = engine.get_engine
    monkeypatch.setattr(engine, "get_engine", lambda *given: built.append(given) or get_engine(*given))
    how = "form='terse',max_new=4,patience=99"
    specs = [f"judge:tiny({how}{more})" for more in ("", ",votes=2", ",batch=3")]
    score = load_rewards(specs, Config(), get_strategy())
    first, second, other = (fn for fn, _ in score.components.values())
    assert first.engine is second.engine is not other.engine and len(judges_here(score)) == 2
    with pytest.warns(UserWarning, match="expected answers with a verdict"):
        score(["12", "3"], ["12", "1"], {})
    assert len(built) == 2
    score.close()

    servers = f"{how},engine_type='openai',servers=('http://h:1',)"
    apart = load_rewards(
        [f"judge:tiny({servers})", f"judge:tiny({servers},votes=2)"], Config(), get_strategy()
    )
    a, b = (fn for fn, _ in apart.components.values())
    assert a.engine is not b.engine


def test_judges_and_heads_may_have_names():
    how = "form='terse',max_new=4"
    specs = [f"judge:tiny({how},name={name!r})" for name in ("polite", "right")]
    score = load_rewards([*specs, f"judge:tiny({how},votes=2)"], Config(), get_strategy())
    assert list(score.components) == ["polite", "right", "judge"]
    polite, right, _ = (fn for fn, _ in score.components.values())
    assert polite.engine is right.engine and len(judges_here(score)) == 1  # a name is no other engine
    with pytest.raises(ValueError, match="expected a name that no other reward has, got name='judge'"):
        load_rewards([f"judge:tiny({how})", f"judge:tiny({how},name='judge')"], Config(), get_strategy())


def test_a_head_may_have_another_name(folder):
    score = load_rewards([f"model:{folder}:a(name='mine')", f"model:{folder}:a"], Config(), get_strategy())
    assert list(score.components) == ["mine", "a"] and len(reward_modules(score)) == 1


@pytest.mark.parametrize("server", ["http://me:S1@h:1", "http://h:1/?api_key=S1"])
def test_a_judges_servers_have_no_secret_in_their_addresses(server):
    """Its text is written into the config of a run."""
    spec = f"judge:tiny(engine_type='openai',servers=({server!r},),key_env='JUDGE_KEY')"
    with pytest.raises(ValueError, match="engine_servers: expected an address without a secret") as error:
        load_rewards([spec], Config(), get_strategy())
    assert "JUDGE_KEY" in str(error.value) and "S1" not in str(error.value)


def test_a_judge_is_built_when_it_is_asked_and_closed_with_the_score():
    st = get_strategy()
    score = load_rewards(["judge:tiny(form='terse', max_new=4)"], Config(), st)
    fn = score.components["judge"][0]
    assert fn.engine is not None
    assert len(score(["12", "3"], ["12", "1"], {}).parts["judge"]) == 2
    score.close()
    assert not fn.engine.status()["alive"]
