"""Reward functions as users bring them: TRL's form and arguments, and other libraries' by their adapters."""

import asyncio
import re
import threading
import time
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch

from rft_fn import data, reward
from rft_fn.data.row_paths import column_at, value_at
from rft_fn.data.tasks import TASKS
from rft_fn.reward.signature import TrainerState, as_messages

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 12?"}]
SAID = ["72", "so 72", ""]


def said(text):
    return [{"role": "assistant", "content": text}]


def score(fn, completions=SAID, prompts=None, columns=None, **given):
    """One reward of weight 1."""
    prompts = prompts or ["p"] * len(completions)
    return reward.weighted(it=(fn, 1.0))(prompts, completions, columns or {}, **given)


def rollout(texts, groups):
    """Two tokens of prompt, then the characters of each text."""
    return tiny.said(texts, torch.arange(len(texts)) // (len(texts) // groups))


# ------------------------------------------------------------------------------------------ messages and text


def seen_by(fn_of, prompts):
    """What a reward is given for the prompts, two responses each."""
    seen = {}

    def spy(prompts, completions, **given):
        seen.update(given, prompts=prompts, completions=completions)
        return [0.0] * len(completions)

    texts = [f"{n}" for n in range(2 * len(prompts))]
    batch = rollout(texts, len(prompts))
    reward.judge(reward.weighted(spy=(fn_of(spy), 1.0)), batch, prompts, tiny.tokenizer())
    return seen


def test_a_prompt_of_messages_has_completions_of_messages():
    """The form of each prompt is its own."""
    prompts = [data.Prompt([3], "6 * 12?", {}, 0, CHAT), data.Prompt([4], "1+1=", {}, 1)]
    seen = seen_by(lambda fn: fn, prompts)
    assert seen["prompts"] == [CHAT, CHAT, "1+1=", "1+1="]
    assert seen["completions"] == [said("0"), said("1"), "2", "3"]


def test_an_adapter_says_the_form():
    prompts = [data.Prompt([3], "6 * 12?", {}, 0, CHAT), data.Prompt([4], "1+1=", {}, 1)]
    seen = seen_by(reward.foreign.messages, prompts)
    assert seen["prompts"] == [CHAT, CHAT, *[[{"role": "user", "content": "1+1="}]] * 2]
    assert seen["completions"] == [said("0"), said("1"), said("2"), said("3")]
    seen = seen_by(reward.foreign.texts, prompts)
    assert seen["prompts"] == ["Be brief.\n6 * 12?"] * 2 + ["1+1="] * 2
    assert seen["completions"] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("completion", "want"),
    [
        ("72", "72"),
        (said("72"), "72"),
        ([*said("call"), {"role": "tool", "content": "3"}, *said("72")], "call\n3\n72"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ""),
        ([{"role": "assistant", "content": [{"type": "text", "text": "7"}, {"type": "image"}]}], "7"),
        ([], ""),
    ],
)
def test_the_text_of_a_completion(completion, want):
    assert reward.text(completion) == want


NAMES = ["math", "numeric", "boxed", "exact", "format", "tags", "task:addition"]


@pytest.mark.parametrize("name", NAMES)
def test_our_verifiers_read_both_forms(name):
    fn = reward.load(name)
    texts = ["72", r"\boxed{72}", "<think>a</think><answer>72</answer>", "7", ""]
    columns = {"answer": ["72"] * len(texts)}
    plain = score(fn, texts, columns=columns).total
    spoken = score(fn, [said(t) for t in texts], [CHAT] * len(texts), columns).total
    assert plain.tolist() == spoken.tolist() and plain.max() == 1.0 and plain.min() == 0.0


# ---------------------------------------------------------------------------------------------- the arguments


def test_a_reward_gets_the_ids_of_the_response_and_the_state_of_the_run():
    seen = {}

    def spy(completions, completion_ids, trainer_state, prompt_texts):
        seen.update(ids=completion_ids, state=trainer_state, texts=prompt_texts)
        return [0.0] * len(completions)

    prompts = [data.Prompt(tiny.tokenizer().encode(t), t, {}, 0) for t in ("1+1=", "2+2=")]
    texts = ["2", "", "4", "44"]
    state = reward.trainer_state(3, 9, prompts=2, size=4)
    one = reward.weighted(spy=(spy, 1.0))
    reward.judge(one, rollout(texts, 2), prompts, tiny.tokenizer(), state=state)
    assert seen["ids"] == [tiny.tokenizer().encode(t) for t in texts]
    assert seen["state"] is state and seen["texts"] == ["1+1=", "1+1=", "2+2=", "2+2="]


def test_the_state_of_a_run():
    state = reward.trainer_state(3, 9, prompts=2, size=4)
    assert (state.global_step, state.max_steps, state.epoch, state.num_train_epochs) == (3, 9, 1.5, 5)
    endless = reward.trainer_state(3, 12)
    assert (endless.epoch, endless.num_train_epochs) == (0.25, 1)
    assert TrainerState().global_step / TrainerState().max_steps == 0.0


def test_the_state_has_the_names_of_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.TrainerState()
    for name in TrainerState.__dataclass_fields__:
        assert hasattr(theirs, name)


def by_position(prompts, completions, answer):
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda prompts, completions, **columns: [1.0] * len(completions), "<lambda>"),
        (lambda completions, **columns: [1.0] * len(completions), "<lambda>"),
        (lambda prompts, completions, completion_ids: [1.0] * len(completions), "<lambda>"),
        (by_position, "by_position"),  # it can be called with three arguments, and returns a list
        ([by_position], "list"),
        ("math", "str"),
        (None, "NoneType"),
    ],
)
def test_a_bare_reward_function_is_no_score(fn, name):
    """As `GRPOTrainer(reward_funcs=fn)` takes it; one line says how it becomes one."""
    line = "score: expected a Score, such as reward.weighted(mine=(fn, 1.0)) makes of reward functions, got "
    with pytest.raises(ValueError, match=f"^{re.escape(line + name)}, which is none by itself$"):
        reward.judge(fn, rollout(["a", "bcd"], 1), [data.Prompt([3], "p", {}, 0)], tiny.tokenizer())


def test_a_score_of_ones_own_gets_what_it_names():
    """Three arguments are enough."""
    prompts = [data.Prompt([3], "p", {}, 0)]

    def bare(prompts, completions, columns):
        return reward.Scored(torch.tensor([1.0, 2.0]), {})

    def more(prompts, completions, columns, *, completion_ids):
        return reward.Scored(torch.tensor([float(len(x)) for x in completion_ids]), {})

    batch = rollout(["a", "bcd"], 1)
    assert reward.judge(bare, batch, prompts, tiny.tokenizer()).reward.tolist() == [[1.0, 2.0]]
    assert reward.judge(more, batch, prompts, tiny.tokenizer()).reward.tolist() == [[1.0, 3.0]]


def test_what_a_reward_logs():
    """As TRL's log_metric and log_extra: the mean of the numbers, the values beside the responses."""

    def fn(completions, log_metric, log_extra):
        log_metric("seen", 1.0)
        log_metric("seen", 4.0)
        log_extra("upper", [c.upper() for c in completions])
        log_extra("odd", [object] * len(completions))
        return [float(len(c)) for c in completions]

    found = score(fn, ["a", "bb"])
    assert found.metrics["it/seen"].tolist() == [2.5, 2.5]
    assert found.extra == {"it/upper": ["A", "BB"], "it/odd": ["<class 'object'>"] * 2}
    with pytest.raises(ValueError, match=r"^reward 'it': log_extra\('x'\): expected 2 values, .*got 1"):
        score(lambda completions, log_extra: log_extra("x", [1]), ["a", "b"])


@pytest.mark.parametrize("name", ["completions", "completion_ids", "trainer_state", "log_metric"])
def test_a_column_cannot_have_the_name_of_an_argument(name):
    with pytest.raises(ValueError, match=f"^column '{name}': the reward's own argument has this"):
        score(lambda completions: [0.0], ["a"], columns={name: [1]})


# ------------------------------------------------------------------------------------------- what is returned


def test_none_is_left_out_of_the_sum_and_counted():
    def halves(completions):
        return [None, 0.5, None]

    both = reward.weighted(
        half=(halves, 2.0), length=(lambda completions: [len(c) for c in completions], 1.0)
    )
    found = both(["p"] * 3, ["a", "bb", "ccc"], {})
    assert found.total.tolist() == [1.0, 3.0, 3.0]
    assert found.parts["half"].isnan().tolist() == [True, False, True]
    judged = reward.Judged(
        found.total[None], {k: v[None] for k, v in found.parts.items()}, ["a", "bb", "ccc"]
    )
    assert reward.means(judged, "reward") == {
        "reward/mean": pytest.approx(7 / 3),
        "reward/half": 0.5,
        "reward/length": 2.0,
        "reward/half/skipped": pytest.approx(2 / 3),
    }


def test_a_reward_that_applies_to_nothing_has_no_mean():
    judged = reward.Judged(torch.ones(1, 2), {"a": torch.full((1, 2), torch.nan)}, ["", ""])
    assert reward.means(judged, "r") == {"r/mean": 1.0, "r/a/skipped": 1.0}


def test_a_row_to_which_nothing_applies_is_an_error_that_names_it():
    both = reward.weighted(
        a=(lambda completions: [1.0, None], 1.0), b=(lambda completions: [None, None], 1.0)
    )
    line = "reward: expected a number from one of a, b for every completion, got None from all of them for "
    line += "completion 1, of the prompt 'second'; add a reward that applies to it, or return 0.0"
    with pytest.raises(ValueError) as error:
        both(["first", "second"], ["x", "y"], {})
    assert str(error.value) == line


def test_rows_may_be_dicts_with_a_score():
    """As verl's functions answer: numbers become metrics, other things are kept to be read."""

    def fn(completions):
        rows = [{"score": 0.5, "acc": True, "pred": "7"}, {"score": torch.tensor(1.0), "acc": np.float32(0)}]
        return [*rows, 0.25]

    found = score(fn)
    assert found.total.tolist() == [0.5, 1.0, 0.25]
    assert found.metrics["it/acc"].tolist()[:2] == [1.0, 0.0] and found.metrics["it/acc"][2].isnan()
    assert found.extra == {"it/pred": ["7", None, None]}
    judged = reward.Judged(
        found.total[None], {"it": found.total[None]}, SAID, {"it/acc": found.metrics["it/acc"][None]}
    )
    assert reward.means(judged, "reward")["reward/it/acc"] == 0.5


@pytest.mark.parametrize(
    "result",
    [
        {
            "rewards": torch.tensor([[1.0], [2.0]]),
            "scores": torch.tensor([0.1, 0.2]),
            "extra_logs": {"m": [3, 4], "n": 5},
        },
        {"reward": [1.0, 2.0], "scores": [0.1, 0.2], "m": torch.tensor([3, 4]), "n": torch.tensor(5.0)},
        (torch.tensor([1.0, 2.0]), {"scores": np.array([0.1, 0.2]), "m": torch.tensor([3.0, 4.0]), "n": 5}),
    ],
)
def test_a_dict_may_answer_for_the_batch(result):
    found = score(lambda completions: result, ["a", "b"])
    assert found.total.tolist() == [1.0, 2.0]
    assert {k: v.tolist() for k, v in found.metrics.items()} == {
        "it/scores": pytest.approx([0.1, 0.2]),
        "it/m": [3.0, 4.0],
        "it/n": [5.0, 5.0],
    } | ({"it/reward": [1.0, 2.0]} if "it/reward" in found.metrics else {})


@pytest.mark.parametrize("values", [torch.tensor([[1.0], [2.0]]), np.array([[1], [2]]), torch.tensor([1, 2])])
def test_tensors_of_one_column_are_values(values):
    assert score(lambda completions: values, ["a", "b"]).total.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([{"acc": 1.0}, 0.0], "reward 'it': value 0: expected a dict with 'score', got one with 'acc'"),
        ({"acc": [1.0, 0.0]}, "reward 'it': expected a dict with 'rewards', got one with 'acc'"),
        ({"rewards": [1.0]}, "reward 'it': expected 2 values, got 1"),
        ([{"score": "high"}, 0.0], "reward 'it': value 0 is 'high', not a finite number; return a float for"),
        (torch.ones(2, 3), "reward 'it': value 0 is [1.0, 1.0, 1.0], not a finite number"),
        (len, "reward 'it': expected a list of 2 numbers, got the function 'len'; if 'it' makes reward"),
    ],
)
def test_what_is_no_result_is_said(result, message):
    with pytest.raises(ValueError) as error:
        score(lambda completions: result, ["a", "b"])
    assert str(error.value).startswith(message)


# ------------------------------------------------------------------------------------------------------ async


async def later(completions):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]


def test_async_rewards_run_together_beside_plain_ones():
    """Each waits until the other two have begun."""
    begun = set()

    def alone(name, until):
        begun.add(name)
        assert time.monotonic() < until, f"expected three that run together, got {sorted(begun)}"
        return len(begun) < 3

    def waits(name):
        async def fn(completions):
            until = time.monotonic() + 60
            while alone(name, until):
                await asyncio.sleep(0.001)
            return [float(len(c)) for c in completions]

        return fn

    def plain(completions):
        until = time.monotonic() + 60
        while alone("plain", until):
            time.sleep(0.001)
        return [1.0 for _ in completions]

    three = reward.weighted(a=(waits("a"), 1.0), plain=(plain, 1.0), b=(waits("b"), 10.0))
    found = three(["p"], ["xy"], {})
    assert list(found.parts) == ["a", "plain", "b"] and found.total.tolist() == [23.0]


def test_every_batch_has_the_same_event_loop():
    """A client of a server, kept between batches, belongs to the loop that it was made in."""
    loops = []

    async def fn(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    both = reward.weighted(fn=(fn, 1.0))
    both(["p"], ["a"], {})
    both(["p"], ["a"], {})
    assert loops[0] is loops[1]


def test_async_rewards_run_where_a_loop_runs_already():
    """As in a notebook."""

    async def notebook():
        return score(later, ["abc"]).total.tolist()

    assert asyncio.run(notebook()) == [3.0]


def test_what_an_async_reward_raises_names_it_and_ends_the_others():
    ended = []

    async def fails(completions):
        await asyncio.sleep(0.01)
        raise KeyError("connection")

    async def patient(completions):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append("patient")
            raise

    began = time.monotonic()
    both = reward.weighted(patient=(patient, 1.0), mine=(fails, 1.0))
    with pytest.raises(KeyError, match="connection") as error:
        both(["p"], ["a"], {})
    assert error.value.__notes__ == ["raised by the reward 'mine'"] and both.running == "mine"
    assert ended == ["patient"] and time.monotonic() - began < 10


def test_a_plain_reward_that_raises_leaves_no_async_one_unawaited():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError):
            reward.weighted(a=(later, 1.0), b=(lambda completions: [1 / 0], 1.0))(["p"], ["a"], {})


def test_async_rewards_run_outside_of_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(score(later, ["ab"]).total.tolist()))
    thread.start()
    thread.join()
    assert found == [[2.0]]


# -------------------------------------------------------------------------------------------- answers by path


ROW = {
    "answer": "1",
    "extra_info": {"answer": "2", "deep": {"er": 3}},
    "extra_info.answer": "4",
    "a.b": {"c": 5},
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("answer", "1"),
        ("extra_info.deep.er", 3),
        ("extra_info.answer", "4"),
        ("a.b.c", 5),
        ("extra_info", ROW["extra_info"]),
    ],
)
def test_the_value_at_a_path(path, value):
    assert value_at(ROW, path) == value
    assert column_at({name: [x, x] for name, x in ROW.items()}, path, 2) == [value, value]


@pytest.mark.parametrize(
    "path", ["nope", "answer.nope", "extra_info.nope", "extra_info.deep.er.nope", ".answer", ""]
)
def test_nothing_at_a_path(path):
    with pytest.raises(KeyError):
        value_at(ROW, path)
    assert value_at(ROW, path, None) is None


@pytest.mark.parametrize(
    "spec",
    ["math:info.gold", "exact:info.gold", "numeric:info.gold", "boxed:info.gold", "exact('info.gold')"],
)
def test_the_answer_of_a_verifier_is_at_a_path(spec):
    chosen = reward.parse([f"{spec}=2"])
    assert reward.columns(chosen) == ("info.gold",)
    right = {"boxed": r"\boxed{72}"}.get(spec.partition(":")[0], "72")
    found = chosen(["p", "p"], [right, "7"], {"info": [{"gold": "72"}, {"gold": "72"}]})
    assert found.total.tolist() == [2.0, 0.0]


def test_a_row_without_the_answer_is_said_when_the_file_is_read():
    rows = [
        {"question": "q", "info": {"gold": "72"}},
        {"question": "q", "info": {}},
        {"question": "q", "info": {"gold": ""}},
    ]
    columns = reward.columns(reward.parse(["math:info.gold"]))
    with pytest.raises(ValueError) as error:
        data.from_rows(rows, tiny.tokenizer(), columns=columns)
    assert "rows, row 2: the row has no column 'info.gold'; it has 'question', 'info'" in str(error.value)
    assert "column 'info.gold' is empty" in str(error.value) and "2 of 3 rows cannot be used" in str(
        error.value
    )
    assert data.from_rows(rows[:1], tiny.tokenizer(), columns=columns).size == 1


# ------------------------------------------------------------------------------------------------------- verl


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str.strip() == ground_truth
    return {"score": float(right), "source": data_source, "index": (extra_info or {}).get("index", -1)}


VERL = {
    "data_source": ["gsm8k", "gsm8k"],
    "reward_model": [{"style": "rule", "ground_truth": "72"}] * 2,
    "extra_info": [{"index": 5}, None],
}


@pytest.mark.parametrize("form", ["text", "messages"])
def test_verl_scores_a_row_a_call(form):
    texts = ["72", "7"]
    completions = texts if form == "text" else [said(t) for t in texts]
    fn = reward.foreign.verl(compute_score)
    assert fn.columns == ("data_source", "reward_model.ground_truth")
    found = score(fn, completions, columns=VERL)
    assert found.total.tolist() == [1.0, 0.0]
    assert found.metrics["it/index"].tolist() == [5.0, -1.0] and found.extra["it/source"] == ["gsm8k"] * 2


def test_verl_of_fewer_arguments_async_and_in_batches():
    def short(solution_str, ground_truth):
        return float(solution_str == ground_truth)

    async def waits(solution_str, ground_truth, **kwargs):
        await asyncio.sleep(0)
        return float(solution_str == ground_truth) + len(kwargs)

    def batched(data_sources, solution_strs, ground_truths, extra_infos):
        return [float(s == g) for s, g in zip(solution_strs, ground_truths)]

    for fn, want in [(short, [1.0, 0.0]), (waits, [3.0, 2.0]), (batched, [1.0, 0.0])]:
        assert score(reward.foreign.verl(fn), ["72", "7"], columns=VERL).total.tolist() == want
    assert score(reward.foreign.verl(short, "gold"), ["7"], columns={"gold": ["7"]}).total.tolist() == [1.0]


def test_verl_says_which_column_is_missing():
    line = r"^column 'reward_model.ground_truth', the reward's ground_truth: not in every row of the "
    line += r"dataset; its columns are: data_source"
    with pytest.raises(ValueError, match=line):
        score(reward.foreign.verl(compute_score), ["7"], columns={"data_source": ["x"]})


# -------------------------------------------------------------------------------------- OpenRLHF and LightRFT


def reward_func(queries, prompts, labels, **kwargs):
    answers = [q[len(p) :] for q, p in zip(queries, prompts)]
    right = torch.tensor([float(a == label) for a, label in zip(answers, labels)])
    return {"rewards": right, "scores": right, "extra_logs": {"length": [len(a) for a in answers]}}


def unusual(questions, asked, truths):
    return reward_func(questions, asked, truths)["rewards"]


@pytest.mark.parametrize("fn", [reward_func, unusual])
def test_openrlhf_sees_prompt_and_response(fn):
    adapted = reward.foreign.openrlhf(fn, "gold")
    assert adapted.columns == ("gold",)
    found = score(adapted, ["72", "7"], ["6*12=", "6*12="], {"gold": ["72", "72"]})
    assert found.total.tolist() == [1.0, 0.0]
    spoken = score(
        adapted, [said("72"), said("7")], [CHAT] * 2, {"gold": ["72", "72"]}, prompt_texts=["<u>6*12<a>"] * 2
    )
    assert spoken.total.tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"^column 'gold', the reward's labels: not in every row"):
        score(adapted, ["7"])


def test_openrlhf_of_two_arguments_needs_no_label():
    seen = []

    def old(queries, prompts):
        seen.append((queries, prompts))
        return torch.tensor([1.0])

    adapted = reward.foreign.openrlhf(old)
    assert adapted.columns == () and score(adapted, ["7"], ["p="], prompt_texts=["<u>p="]).total.tolist() == [
        1.0
    ]
    assert seen == [(["<u>p=7"], ["<u>p="])]


def reward_fn(model_reward_list, labels, queries, refs, label_map):
    assert [x.tolist() for x in model_reward_list] == [[0.0] * len(labels)] and label_map == {}
    right = torch.tensor([float(label == "rule" and q == r) for label, q, r in zip(labels, queries, refs)])
    return 0.9 * right, {"accuracy_reward": right}


def test_lightrft_returns_rewards_and_metrics():
    adapted = reward.foreign.lightrft(reward_fn)
    assert adapted.columns == ("label", "reference")
    columns = {"label": ["rule", "rule", "other"], "reference": ["72"] * 3}
    found = score(adapted, ["72", "7", "72"], columns=columns)
    assert found.total.tolist() == pytest.approx([0.9, 0.0, 0.0])
    assert found.metrics["it/accuracy_reward"].tolist() == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"^column 'reference', the reward's refs: not in every row"):
        score(adapted, ["7"], columns={"label": ["rule"]})


@pytest.mark.parametrize("fn", [reward_func, unusual])
def test_the_reward_file_of_lightrft_sees_prompt_and_response(fn):
    """One row too: with other arguments in these places it would earn something, and nobody would know."""
    adapted = reward.foreign.lightrft(fn)
    assert adapted.columns == ("label",)
    for texts, values in ((["72"], [1.0]), (["72", "7"], [1.0, 0.0])):
        count = len(texts)
        found = score(
            adapted, texts, ["6*12="] * count, {"label": ["72"] * count}, prompt_texts=["<u>6"] * count
        )
        assert found.total.tolist() == values
    assert reward.foreign.lightrft(fn, "gold").columns == ("gold",)


def test_the_reward_file_of_lightrft_for_images_sees_references():
    def of_references(queries, prompts, references):
        assert queries == ["p=7"] and prompts == ["p="] and references == ["7"]
        return torch.tensor([1.0])

    adapted = reward.foreign.lightrft(of_references)
    assert adapted.columns == ("reference",)
    assert score(adapted, ["7"], ["p="], {"reference": ["7"], "label": ["x"]}).total.tolist() == [1.0]


def test_a_recipe_of_lightrft_with_fewer_arguments_is_called_by_name():
    def some(queries, refs):
        return [float(q == r) for q, r in zip(queries, refs)], {}

    assert score(reward.foreign.lightrft(some), ["7"], ["p="], {"reference": ["7"]}).total.tolist() == [1.0]


@pytest.mark.parametrize("adapter", ["openrlhf", "lightrft"])
def test_names_in_other_places_are_refused_and_not_filled_with_something_else(adapter):
    def other(responses, queries, prompts):
        return [1.0]

    def longer(queries, prompts, labels, images):
        return [1.0]

    columns = {"label": ["7"], "reference": ["7"]}
    for fn, names in ((other, "responses, queries, prompts"), (longer, "queries, prompts, labels, images")):
        line = (
            rf"expected a reward of \(queries, prompts, labels\), by these names .*, got one of \({names}\)"
        )
        with pytest.raises(ValueError, match=line):
            score(reward.foreign.CONVENTIONS[adapter].adapt(fn), ["7"], ["p="], columns)


# -------------------------------------------------------------------------------------------------- verifiers


class Parser:
    def parse_answer(self, completion):
        return completion[-1]["content"].strip()


def correct(parser, completion, answer):
    return 1.0 if parser.parse_answer(completion) == answer else 0.0


async def judge_length(prompt, completion, state, **kwargs):
    await asyncio.sleep(0)
    assert state["prompt"] == prompt and state["answer"] == kwargs["answer"] and kwargs["info"] == {"k": 1}
    return float(len(completion[0]["content"]))


def longest(completions, answers):
    sizes = [len(c[0]["content"]) for c in completions]
    return [float(n == max(sizes)) for n in sizes]


def breaks(completion):
    return 1 / len(completion[0]["content"])


RUBRIC = SimpleNamespace(
    funcs=[correct, judge_length, longest], weights=[1.0, 0.1, 0.0], class_objects={"parser": Parser()}
)
COLUMNS = {"answer": ["72"] * 4, "info": [{"k": 1}] * 4}


@pytest.mark.parametrize("form", ["text", "messages"])
def test_a_rubric_is_the_weighted_sum_of_its_functions(form):
    texts, prompts = ["72", "7", "720", "72"], ["p", "p", "q", "q"]
    completions = texts if form == "text" else [said(t) for t in texts]
    prompts = prompts if form == "text" else [as_messages(p, "user") for p in prompts]
    adapted = reward.foreign.CONVENTIONS["verifiers"].adapt(RUBRIC)
    assert adapted.columns == ("answer",)
    found = score(adapted, completions, prompts, COLUMNS)
    assert found.total.tolist() == pytest.approx([1.2, 0.1, 0.3, 1.2])
    assert {k: v.tolist() for k, v in found.metrics.items()} == {
        "it/correct": [1.0, 0.0, 0.0, 1.0],
        "it/judge_length": [2.0, 1.0, 3.0, 2.0],
        "it/longest": [1.0, 0.0, 1.0, 0.0],  # by prompt
        "it/failed": [0.0] * 4,
    }


def test_a_rubric_of_older_names_a_group_of_rubrics_and_a_function():
    older = SimpleNamespace(reward_funcs=[correct], reward_weights=[0.5], class_objects={"parser": Parser()})
    group = SimpleNamespace(rubrics=[older, RUBRIC])
    environment = SimpleNamespace(rubric=group)
    verifiers = reward.foreign.CONVENTIONS["verifiers"].adapt
    found = score(verifiers(environment), ["72"], columns={"answer": ["72"], "info": [{"k": 1}]})
    assert found.total.tolist() == pytest.approx([1.7])
    assert score(verifiers(lambda completion, gold: float(completion[0]["content"] == gold), "gold"), ["7"],
                 columns={"gold": ["7"]}).total.tolist() == [1.0]  # fmt: skip
    with pytest.raises(ValueError, match=r"^verifiers: expected a rubric with funcs and weights, got int"):
        verifiers(3)


def test_a_function_of_a_rubric_that_raises_scores_nothing_and_is_counted():
    adapted = reward.foreign.CONVENTIONS["verifiers"].adapt(
        SimpleNamespace(funcs=[breaks, correct], weights=[1.0, 1.0])
    )
    with (
        pytest.warns(UserWarning, match=r"rubric: breaks raised ZeroDivisionError.*; that scores 0"),
        pytest.warns(UserWarning, match=r"rubric: correct raised TypeError.*'parser'.*; that scores 0"),
    ):
        found = score(adapted, ["7777", ""], columns={"answer": ["", ""]})
    assert found.total.tolist() == [0.25, 0.0]
    assert found.metrics["it/failed"].tolist() == [1.0, 2.0]  # correct needs a parser
    assert found.metrics["it/breaks"].tolist()[0] == 0.25 and found.metrics["it/breaks"][1].isnan()


# ---------------------------------------------------------------------------------------------- the preflight


ROWS = [TASKS["addition"].generate(0, index, 1) for index in range(2)]
SPOKEN = [{**row, "prompt": [{"role": "user", "content": row["question"]}]} for row in ROWS]


def reads_messages(completions, answer, **kwargs):
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]


def swallows(completions, answer, **kwargs):
    """As many do: what cannot be read is the worst answer."""
    out = []
    for completion, a in zip(completions, answer):
        try:
            out.append(float(completion[0]["content"] == a))
        except Exception:
            out.append(-5.0)
    return out


def reads_text(completions, answer, **kwargs):
    return [float(c.strip() == a) for c, a in zip(completions, answer)]


def test_the_preflight_follows_the_data():
    for fn, rows in [(reads_messages, SPOKEN), (swallows, SPOKEN), (reads_text, ROWS)]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scored = reward.check(reward.weighted(fn=(fn, 1.0)), rows)
        assert scored["answer"].total.tolist() == [1.0, 1.0] and scored["garbage"].total.max() < 1
    prompts = [
        data.Prompt([3], "q", row, i, [{"role": "user", "content": "q"}]) for i, row in enumerate(ROWS)
    ]
    assert reward.check(reward.weighted(fn=(reads_messages, 1.0)), prompts)["answer"].total.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("fn", "rows", "own", "other", "form"),
    [
        (reads_messages, ROWS, "texts", "lists of messages", "messages"),
        (reads_text, SPOKEN, "lists of messages", "texts", "text"),
    ],
)
def test_a_reward_that_reads_the_other_form_is_an_error_that_says_so(fn, rows, own, other, form):
    with pytest.raises(ValueError) as error:
        reward.check(reward.weighted(mine=(fn, 1.0)), rows)
    text = str(error.value)
    assert text.startswith(
        f"reward 'mine': it cannot read completions that are {own}, the form of the data ("
    )
    assert text.endswith(f"and can read {other}: write {form}:mine")


def test_a_reward_that_is_silent_about_the_form_is_a_warning_that_says_so(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def accuracy(completions, answer, **kwargs):\n"
        "    try:\n"
        "        return [float(c[0]['content'] == a) for c, a in zip(completions, answer)]\n"
        "    except Exception:\n"
        "        return [-5.0] * len(completions)\n"
    )
    line = "^reward 'accuracy': it scores -5 for nothing, for garbage and for every reference; it tells "
    line += "them apart where they are lists of messages, and the data's are texts: "
    line += f"write messages:{path}:accuracy$"
    with pytest.warns(UserWarning, match=line):
        reward.check(reward.parse([f"{path}:accuracy"]), ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scored = reward.check(reward.parse([f"messages:{path}:accuracy"]), ROWS)
    assert scored["answer"].total.tolist() == [1.0, 1.0]


def test_the_preflight_finds_an_answer_that_is_not_called_answer():
    rows = [{"question": "q", "reward_model": {"ground_truth": "72"}}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scored = reward.check(reward.parse(["numeric:reward_model.ground_truth"]), rows)
        named = reward.check(reward.parse(["exact:gold"]), [{"question": "q", "gold": "x"}], answer="gold")
    assert scored["answer"].total.tolist() == [1.0] and named["answer"].total.tolist() == [1.0]


def test_a_reward_may_be_constant_where_no_answer_is_known():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scored = reward.check(reward.parse(["format"]), [{"question": "q", "solution": "x"}])
    assert set(scored) == {"empty", "garbage"}


def test_the_preflight_gives_all_that_a_run_gives():
    def fn(completions, completion_ids, trainer_state, log_metric):
        log_metric("n", 1)
        assert all(len(ids) == len(c) for ids, c in zip(completion_ids, completions))
        return [-len(ids) + trainer_state.global_step / trainer_state.max_steps for ids in completion_ids]

    assert reward.check(reward.weighted(fn=(fn, 1.0)), ROWS)["answer"].total.tolist() == [-1.0, -2.0]


def test_partials_and_objects_are_rewards():
    class Length:
        __name__ = "length"

        def __call__(self, completions, scale, **kwargs):
            return [scale * len(c) for c in completions]

    assert score(partial(Length(), scale=2.0), ["abc"]).total.tolist() == [6.0]
    assert reward.columns(reward.weighted(a=(Length(), 1.0))) == ("scale",)
