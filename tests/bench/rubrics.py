"""A judge by a rubric's criteria beside one number, on planted faults: `python tests/bench/rubrics.py`.

The embedded default learns by SFT to judge answers to sort_digits, by three criteria and by how many of them
are met, in equal shares. Then it judges problems that training held out: the right answer, and the same with
one criterion broken. Counted is how often the right one has the higher reward; a tie is half. Writes
docs/results/rubrics.json and the table of docs/reward_models.md; `--draw` only the table.
"""

import argparse
import itertools
import json
import random
import sys
import time
from pathlib import Path

from judge import problems
from record import ROOT, made, put

import rft_fn as rft
from rft_fn.reward import forms
from rft_fn.reward.verdicts import TerseNumber

DATA = ROOT / "docs" / "results" / "rubrics.json"
CRITERIA = {  # of a question's digits and a response
    "order": lambda digits, text: list(text) == sorted(text),
    "digits": lambda digits, text: {*text} <= {*digits},
    "length": lambda digits, text: len(text) == len(digits),
}
RUBRIC = [{"name": name, "text": name} for name in CRITERIA]
MOST = len(CRITERIA)
FORMS = {
    "one number": forms.Form("all:{prompt}:{response}:", TerseNumber(0, MOST), forms.flat),
    "by criterion": forms.Form("{criterion}:{prompt}:{response}:", TerseNumber(0, MOST), forms.flat),
}
ASKED = {"greedy": 1, "5 votes": 5}
OPTIONS = {"steps": 300, "batch": 64, "lr": 3e-3, "warmup": 10, "lr_end": 0.1, "seed": 0}


def broken(fault, digits, drawn):
    """Return the digits in order, with one criterion broken and the others met; None where it cannot be."""
    right = sorted(digits)
    if fault == "length":
        return "".join(sorted([*right, drawn.choice(right)]))
    for _ in range(20):
        text = list(right)
        if fault == "order":
            drawn.shuffle(text)
        else:
            text[drawn.randrange(len(text))] = drawn.choice("0123456789")
            text.sort()
        if [name for name, meets in CRITERIA.items() if not meets(digits, text)] == [fault]:
            return "".join(text)
    return None


def examples(count):
    """Yield (question, verdict): half ask how many criteria are met, the others about one of them."""
    drawn, source = random.Random(0), problems(0, held_out=False)
    for i in range(count):
        row = next(source)
        digits = row["short"][5:-1]
        kind = drawn.choice(["right", *CRITERIA, *CRITERIA, "any"])
        text = row["answer"] if kind == "right" else None
        if kind in CRITERIA:
            text = broken(kind, digits, drawn)
        text = text or "".join(drawn.choices("0123456789", k=drawn.randint(1, 5)))
        met = {name: meets(digits, text) for name, meets in CRITERIA.items()}
        name = drawn.choice([*CRITERIA])
        form = FORMS["by criterion" if i % 2 else "one number"]
        verdict = met[name] if i % 2 else sum(met.values()) / MOST
        question = form.question({"prompt": row["short"], "response": text, "criterion": name})
        yield {"question": question, "verdict": form.parse.write(float(verdict))}


def measured(engine, tokenizer, way, votes, count):
    """Ask about all responses, and return {fault: share of pairs in the right order} and more."""
    judge = rft.reward.generative(
        engine,
        tokenizer,
        form=FORMS[way],
        votes=votes,
        patience=10**6,
        unparsable=0.0 if way == "one number" else None,
    )
    if way == "by criterion":
        judge = rft.reward.by_criterion(judge)
    drawn, asked = random.Random(1), []
    for row in itertools.islice(problems(1, held_out=True), count):
        digits = row["short"][5:-1]
        faulty = {fault: broken(fault, digits, drawn) for fault in CRITERIA}
        asked += [(row["short"], fault, text) for fault, text in {"": row["answer"], **faulty}.items()]
    logged = {}
    prompts, texts = zip(*((prompt, text or "") for prompt, _, text in asked), strict=True)
    values = judge.fn(
        prompts,
        texts,
        keys=range(len(texts)),
        log_metric=logged.__setitem__,
        log_extra=lambda *_: None,
        rubric=[RUBRIC] * len(texts),
    )
    values = [x["score"] if isinstance(x, dict) else x for x in values]
    found = {"asked": {}, "share": {}, "ties": {}, "unparsable": logged["unparsable"]}
    for at, fault in enumerate(CRITERIA, 1):
        both = [(values[i], values[i + at]) for i in range(0, len(values), 1 + MOST) if texts[i + at]]
        found["asked"][fault] = len(both)
        found["share"][fault] = sum((x > y) + (x == y) / 2 for x, y in both) / len(both)
        found["ties"][fault] = sum(x == y for x, y in both) / len(both)
    return found


def table(found):
    """The rows of a page."""
    names = [f"{name} broken" for name in CRITERIA]
    head = ["the judge gives", "asked", *names, "all", "ties", "answers without a verdict"]
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for way, ways in found["judged"].items():
        for asked, x in ways.items():
            pairs = x["asked"]
            means = [sum(x[y][f] * pairs[f] for f in pairs) / sum(pairs.values()) for y in ("share", "ties")]
            cells = [f"{y:.3f}" for y in (*x["share"].values(), *means, x["unparsable"])]
            rows.append(f"| {way} | {asked} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "rubrics")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    if not args.draw:
        sys.path.insert(0, str(ROOT / "train_scripts"))
        import sft

        args.runs.mkdir(parents=True, exist_ok=True)
        rows, began = args.runs / "rows.jsonl", time.perf_counter()
        lines = [json.dumps(row) + "\n" for row in examples(OPTIONS["steps"] * OPTIONS["batch"])]
        rows.write_text("".join(lines))
        model = str(args.runs / "judge" / "model")
        if not Path(model).exists():
            options = OPTIONS | {"data": (str(rows),), "out": str(args.runs / "judge")}
            sft.main(sft.Config(template="{question}", response="{verdict}", **options))
        found = made() | {"options": OPTIONS, "count": args.count, "judged": {}}
        tokenizer = rft.model.load_tokenizer(model)
        engine = rft.engine.get_engine(None, model, tokenizer)
        for way, (asked, votes) in itertools.product(FORMS, ASKED.items()):
            x = measured(engine, tokenizer, way, votes, args.count)
            found["judged"].setdefault(way, {})[asked] = x
            print(way, asked, x, f"{time.perf_counter() - began:.0f} s", flush=True)
        args.data.write_text(json.dumps(found, indent=1) + "\n")
    shown = table(json.loads(args.data.read_text()))
    print(shown)
    if args.data == DATA:
        put("docs/reward_models.md", {"rubrics": shown})


if __name__ == "__main__":
    main()
