"""Tasks of lm-eval by our engine and by its backend `hf`, row by row: `tests/bench/lm_eval_backends.py`.

The tasks are arc_easy and aime25 as lm-eval has them, but for their rows: sums made here, in the schemas of
those data sets, so that no network is needed. Prints the numbers of both, and each row that differs.
"""

import argparse
import json
import random
import tempfile
from importlib.util import find_spec
from pathlib import Path

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import rft_fn as rft
from rft_fn.model.model_names import resolve

TASK = """include: {tasks}/{file}
task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{test: {rows}}}}}
training_split: null
validation_split: null
test_split: test
{more}
"""


def sums(count):
    """Return (rows of arc_easy, rows of aime25): sums of two numbers, with four choices and without."""
    drawn = random.Random(0)
    choices, problems = [], []
    for _ in range(count):
        a, b = drawn.randrange(10, 100), drawn.randrange(10, 100)
        texts = [str(a + b + x) for x in (0, *drawn.sample((-20, -10, -2, -1, 1, 2, 10, 20), 3))]
        drawn.shuffle(texts)
        at = texts.index(str(a + b))
        options = {"text": texts, "label": list("ABCD")}
        choices.append({"question": f"What is {a} + {b}?", "choices": options, "answerKey": "ABCD"[at]})
        problems.append({"problem": f"What is {a} + {b}?", "answer": str(a + b)})
    return choices, problems


def task_files(folder, count):
    """Write the tasks, and return their files."""
    tasks = Path(find_spec("lm_eval").origin).parent / "tasks"
    choices, problems = sums(count)
    limits = '{until: ["Question:"], do_sample: false, max_gen_toks: 32}'
    for name, rows, file, more in (
        ("sums_arc", choices, "arc/arc_easy.yaml", ""),
        ("sums_aime", problems, "aime/aime25.yaml", f"generation_kwargs: {limits}"),
    ):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = TASK.format(tasks=tasks, file=file, name=name, rows=path, more=more)
        (folder / f"{name}.yaml").write_text(text)
        yield folder / f"{name}.yaml"


def samples(model, file):
    """Return (results, samples in the order of the rows) of a task by one backend."""
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[str(file)],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    (results,), (rows,) = found["results"].values(), found["samples"].values()
    means = {name: x for name, x in results.items() if "," in name and "stderr" not in name}
    return means, sorted(rows, key=lambda row: row["doc_id"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--count", type=int, default=40)
    args = parser.parse_args()
    tokenizer = rft.model.load_tokenizer(args.model)
    engine = rft.engine.get_engine(rft.engine.EngineConfig(batch=16), args.model, tokenizer)
    window = rft.model.read_window(args.model)
    ours = rft.run.harness_model(
        engine, rft.strategy.get_strategy(), tokenizer, seed=0, window=window, batch=16
    )
    theirs = HFLM(pretrained=resolve(args.model), dtype="float32", device="cpu", batch_size=1)
    with tempfile.TemporaryDirectory() as folder:
        for file in task_files(Path(folder), args.count):
            (means, a), (their_means, b) = samples(ours, file), samples(theirs, file)
            print(f"{file.stem}: {len(a)} rows, ours {means}, hf {their_means}")
            if a[0]["doc"].get("choices"):
                both = [(x[0][0], y[0][0]) for r, s in zip(a, b) for x, y in zip(r["resps"], s["resps"])]
                far = max(abs(x - y) for x, y in both)
                print(f"  {len(both)} log-likelihoods, which differ by {far:.1e} nats at most")
            else:
                print(f"  {sum(r['resps'] == s['resps'] for r, s in zip(a, b))} equal responses")
            grades = [[row[name.split(",")[0]] for name in means] for row in (*a, *b)]
            unlike = [i for i in range(len(a)) if grades[i] != grades[len(a) + i]]
            print(f"  rows with other grades: {unlike or 'none'}")
            for i in unlike:
                print(f"  row {i}: ours {a[i]['resps']}, hf {b[i]['resps']}")


if __name__ == "__main__":
    main()
