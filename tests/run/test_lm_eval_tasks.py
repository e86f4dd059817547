"""Tasks of lm-eval by our engine: draws, grades by hand, and the numbers of its own backend."""

import json

import chats
import pytest
import torch
from test_house import load_script

import rft_fn as rft
from rft_fn import rng
from rft_fn.model.model_names import resolve
from rft_fn.run.evaluation_result import summary

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

TOKENIZER = rft.model.load_tokenizer("tiny")

GSM8K = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: ["(?s).*#### "]}}
generation_kwargs: {{until: ["Question:"], do_sample: false, max_gen_toks: 40}}
filter_list:
  - name: strict-match
    filter:
      - {{function: regex, regex_pattern: "#### (\\\\-?[0-9\\\\.\\\\,]+)"}}
      - {{function: take_first}}
  - name: flexible-extract
    filter:
      - {{function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"}}
      - {{function: take_first}}
metadata: {{version: 3.0}}
"""
CHOICES = """
task: order
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def task_file(folder, text, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "task.yaml"
    file.write_text(text.format(rows=folder / "rows.jsonl"))
    return f"lm_eval:{file}"


def sorting(folder, text=GSM8K, count=4):
    """A task of the questions that the tiny model's alphabet can write."""
    rows = [{"question": f"sort:{700 + 17 * i}=", "answer": f"#### {i}"} for i in range(count)]
    text = text.replace("Question: {{{{question}}}}\\nAnswer:", "{{{{question}}}}")
    return task_file(folder, text, rows)


def tiny(**options):
    eng = rft.engine.get_engine(rft.engine.EngineConfig(batch=4), "tiny", TOKENIZER)
    options = {"seed": 5, "window": rft.model.read_window("tiny"), "batch": 4} | options
    return eng, rft.run.harness_model(eng, rft.strategy.get_strategy(), TOKENIZER, **options)


class Letters:
    """A tokenizer of characters, for answers that are planted."""

    eos_token_id, bos_token, name_or_path = 0, None, "letters"

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))


def planted(texts, asked):
    """A model of lm-eval whose samples of each problem are these texts."""
    from rft_fn.run.lm_eval_model import EngineModel, _rows

    def generate(prompts, keys, n, sampling):
        asked.append((len(prompts), n, sampling))
        question = ["".join(map(chr, p)).split("Question: ")[-1].split("\n")[0] for p in prompts]
        return _rows(
            [(p, [ord(c) for c in texts[q][j]]) for p, q in zip(prompts, question) for j in range(n)]
        )

    def sampling(arguments):
        return rft.Sampling(temperature=0.7, max_new=arguments["max_gen_toks"])

    return EngineModel(
        generate, None, sampling, Letters(), seed=0, window=200, batch=8, chat_template_kwargs={}
    )


def test_no_context_ends_with_the_end_that_a_tokenizer_adds():
    model = planted({}, [])
    model.tokenizer = chats.ending()
    assert model.tokenizer.decode(model.tok_encode("1+1=")) == "<bos>1+1="
    assert model.tok_encode("1", add_special_tokens=False) == model.tokenizer.encode("1")[1:-1]


def test_each_answer_is_graded_by_the_task(tmp_path):
    """By hand, with rows of GSM8K's form: what follows a stop is no answer, a comma is another text."""
    rows = [{"question": "a", "answer": "3 eggs\n#### 18"}, {"question": "b", "answer": "#### 5"}]
    texts = {
        "a": ["#### 18 Question: #### 9", "#### 18", "it is 18", "#### 7"],
        "b": ["#### 4", "#### 4", "#### 5", "no idea"],
    }
    asked = []
    model = planted(texts, asked)
    strict, flexible = rft.run.harness_tasks(model, [task_file(tmp_path, GSM8K, rows)], repeats=4)
    assert asked == [(2, 4, rft.Sampling(temperature=0.7, max_new=40))]
    assert strict.name == "sums/strict-match/exact_match"
    assert strict.value.tolist() == [[1, 1, 0, 0], [0, 0, 1, 0]]
    assert flexible.value.tolist() == [[1, 1, 1, 0], [0, 0, 1, 0]]
    assert strict.answer.tolist() == [[0, 0, -1, 1], [0, 0, 1, -1]]
    found = summary(flexible, (1, 2, 4), 0, model="tiny")["result"]
    assert found == pytest.approx(
        {
            "avg@4": 1 / 2,
            "pass@1": 1 / 2,
            "pass@2": (1 + 1 / 2) / 2,
            "pass@4": 1,
            "maj@2": (1 + 1 / 2 + 0 + 1 / 1) / 4 - (1 - 1) / 4,  # a: right, a tie; b: wrong, right
            "maj@4": (1 + 0) / 2,
            "questions": 2,
            "truncated": 0,
        }
    )
    assert flexible.reported == 0.5  # lm-eval's own number is of the first answers
    assert [row["answer/strict-match"] for row in strict.rows[:3]] == ["18", "18", "[invalid]"]
    wanted = {"temperature": 0.7, "max_new": 40, "few-shot examples": 0, "extraction": "strict-match"}
    assert wanted.items() <= strict.protocol.items() and strict.protocol["first prompt"].startswith(
        "Question"
    )


def test_a_request_that_occurs_again_is_another_sample():
    """An occurrence has the stream of sample j, whatever is asked beside it."""
    eng, model = tiny(temperature=1.0)
    arguments = {"until": ["\n"], "max_gen_toks": 6}
    first, second = (
        Instance("generate_until", {}, (f"sort:{x}=", arguments), 0, ("t", i, 1))
        for i, x in enumerate((351, 824))
    )
    found = model.generate_until([first, first, second, first])
    key = rng.fold_in(5, "t", 0, 0)
    sampling = rft.Sampling(max_new=6, stop=("\n",))
    rollout = eng.generate([TOKENIZER.encode("sort:351=")], [key], n=3, sampling=sampling)
    assert [found[0], found[1], found[3]] == model._texts(rollout, ["\n"])
    assert len({found[0], found[1], found[3]}) > 1
    assert model.generate_until([second]) == [found[2]]


def test_prompts_that_do_not_fit_lose_their_first_tokens(tmp_path):
    _, model = tiny(window=12, max_new=6)
    (measured, _) = rft.run.harness_tasks(model, [sorting(tmp_path, count=2)])
    assert measured.protocol["prompts without their first tokens"] == 2


@pytest.mark.slow
def test_greedy_answers_and_likelihoods_are_those_of_its_own_backend(tmp_path):
    """To the row: texts, extracted answers, and log-likelihoods of choices."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    folder = resolve("tiny")
    theirs = HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=1)
    _, ours = tiny()
    (tmp_path / "generated").mkdir()
    rows = [
        {"question": f"sort:{513 + 37 * i}=", "choices": ["123", "21", "345"], "label": i % 3}
        for i in range(5)
    ]
    for name in (sorting(tmp_path / "generated", count=5), task_file(tmp_path, CHOICES, rows)):
        samples = []
        for model in (theirs, ours):
            out = lm_eval.simple_evaluate(
                model=model,
                tasks=[name.removeprefix("lm_eval:")],
                task_manager=TaskManager(include_defaults=False),
                bootstrap_iters=0,
            )
            samples.append(next(iter(out["samples"].values())))
        for a, b in zip(*samples, strict=True):
            assert a["doc_id"] == b["doc_id"]
            if "choices" in a["doc"]:
                values = [torch.tensor([x[0][0] for x in s["resps"]]) for s in (a, b)]
                torch.testing.assert_close(*values, atol=1e-4, rtol=0)
                assert [x[0][1] for x in a["resps"]] == [x[0][1] for x in b["resps"]] and a["acc"] == b["acc"]
            else:
                assert a["resps"] == b["resps"] and a["filtered_resps"] == b["filtered_resps"]


def test_evaluate_reports_tasks_beside_another_model(tmp_path, capsys):
    evaluate = load_script("evaluate")
    out, name = tmp_path / "out.json", sorting(tmp_path)
    options = {"tasks": (name,), "group": 3, "k": (1, 3), "temperature": 1.0, "max_new": 5, "count": 3}
    evaluate.main(evaluate.Config(**options, beside="tiny:sort_digits:2", out=str(out)))
    shown, found = capsys.readouterr().out, json.loads(out.read_text())["tasks"]
    assert list(found) == ["sums/strict-match/exact_match", "sums/flexible-extract/exact_match"]
    for report in found.values():
        assert report["result"]["questions"] == 3 and report["protocol"]["samples per problem"] == 3
        assert report["protocol"]["harness"].startswith("lm-eval ") and "maj@3" in report["difference"]
        assert report["beside"]["protocol"]["model"] == "tiny:sort_digits:2"
    assert "  temperature: 1.0" in shown and "  max_new: 5" in shown and "beside 0." in shown
    assert len(out.with_suffix(".jsonl").read_text().splitlines()) == 2 * 3 * 3


@pytest.mark.slow
@pytest.mark.usefixtures("plain_runs")
def test_a_run_evaluates_tasks_too_moves_no_weight_and_resumes_to_the_byte(tmp_path):
    grpo, name = load_script("grpo"), sorting(tmp_path)
    usual = {"prompts": 2, "group": 2, "eval_prompts": 3, "eval_every": 1, "tokens_every": 0}
    usual |= {"warmup": 0, "lr_end": 1.0}  # so that steps can be added

    def train(folder, *parts, **options):
        for steps in parts:
            grpo.main(grpo.Config(steps=steps, out=str(tmp_path / folder), **usual | options))
        files = ("metrics.jsonl", "model/model.safetensors")
        return [(tmp_path / folder / file).read_bytes() for file in files]

    rows, weights = train("whole", 2, eval_tasks=(name,))
    assert [rows, weights] == train("resumed", 1, 2, eval_tasks=(name,))
    assert weights == train("plain", 2)[1]
    for row in map(json.loads, rows.splitlines()):
        assert row["eval/lm_eval:sums/strict-match/exact_match"] == 0
        assert 0 <= row["eval/lm_eval:sums/flexible-extract/exact_match"] <= 1


UNSAFE = GSM8K + "unsafe_code: true\n"
MAJORITY = GSM8K.split("filter_list")[0] + (
    "filter_list:\n  - {{name: maj, filter: [{{function: take_first_k, k: 2}}, {{function: majority_vote}}, "
    "{{function: take_first}}]}}\n"
)


@pytest.mark.parametrize(
    ("text", "repeats", "line"),
    [
        (CHOICES, 2, "group: expected 1 for order, whose answers are scored and not sampled, got 2"),
        (UNSAFE, 1, "tasks: sums: expected a task that runs no code of the model"),
        (MAJORITY, 2, "tasks: sums: expected filters that read one answer, got one of several"),
    ],
)
def test_tasks_that_cannot_be_graded_so_are_refused(text, repeats, line, tmp_path):
    rows = [{"question": "a", "choices": ["1", "2"], "label": 0, "answer": "#### 1"}]
    model = planted({"a": ["#### 1"] * 2}, [])
    with pytest.raises(ValueError, match=line):
        rft.run.harness_tasks(model, [task_file(tmp_path, text, rows)], repeats=repeats)


def test_a_task_that_is_not_there_is_a_line():
    with pytest.raises(ValueError, match=r"tasks: lm_eval:no/such\.yaml: KeyError: .*not a registered task"):
        rft.run.harness_tasks(planted({}, []), ["lm_eval:no/such.yaml"])
