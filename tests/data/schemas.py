"""The table of docs/data.md: rows as people have them, the options to type, and what these make of a row.

PYTHONPATH=tests python tests/data/schemas.py        writes the table anew
"""

import json
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import chats
from test_house import load_script

from rft_fn import data, parsing

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BEGIN, END = "<!-- schemas:begin -->", "<!-- schemas:end -->"

# short enough to be read in a table, with all that a template can have
TEMPLATE = """
{%- if tools %}{{ '(tools)' + (tools | tojson) + '<end>' }}{% endif %}
{%- for m in messages %}({{ m.role }}){{ m.content }}
{%- for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<end>
{%- endfor %}
{%- if add_generation_prompt %}(assistant){% endif %}"""


class Schema(NamedTuple):
    """Rows of one form, and what to type for them."""

    name: str
    row: dict[str, Any]
    script: str
    options: str
    suffix: str = ".jsonl"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


ADD = {"name": "add", "arguments": {"a": 2, "b": 2}}
SCHEMAS = (
    Schema("TRL, prompt only, text", {"prompt": "2+2?"}, "grpo", "--template '{prompt}'"),
    Schema("TRL, prompt only, messages", {"prompt": [user("2+2?")]}, "grpo", "--messages prompt"),
    Schema(
        "TRL, prompt and completion, text",
        {"prompt": "2+2?", "completion": "4"},
        "sft",
        "--template '{prompt}' --response '{completion}'",
    ),
    Schema(
        "TRL, prompt and completion, messages",
        {"prompt": [user("2+2?")], "completion": [says("4")]},
        "sft",
        "--messages prompt completion",
    ),
    Schema(
        "TRL and OpenAI, messages",
        {"messages": [user("2+2?"), says("4"), user("+1?"), says("5")]},
        "sft",
        "--messages messages",
    ),
    Schema(
        "the same, the last answer alone",
        {"messages": [user("2+2?"), says("4"), user("+1?"), says("5")]},
        "sft",
        "--messages messages --loss-on last",
    ),
    Schema(
        "OpenAI, with tools",
        {
            "messages": [
                user("2+2?"),
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "add", "arguments": json.dumps(ADD["arguments"])},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "4"},
                says("It is 4."),
            ],
            "tools": [{"type": "function", "function": {"name": "add"}}],
        },
        "sft",
        "--messages messages",
    ),
    Schema(
        "TRL, preference with prompt (the chosen one)",
        {"prompt": [user("2+2?")], "chosen": [says("4")], "rejected": [says("5")]},
        "sft",
        "--messages prompt chosen",
    ),
    Schema(
        "TRL, preference without prompt (the chosen one)",
        {"chosen": [user("2+2?"), says("4")], "rejected": [user("2+2?"), says("5")]},
        "sft",
        "--messages chosen",
    ),
    Schema(
        "sharegpt",
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "2+2?"},
                {"from": "gpt", "value": "4"},
            ]
        },
        "sft",
        "--messages conversations",
    ),
    Schema(
        "sharegpt, with tools",
        {
            "conversations": [
                {"from": "human", "value": "2+2?"},
                {"from": "function_call", "value": json.dumps(ADD)},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "It is 4."},
            ],
            "tools": json.dumps([{"name": "add"}]),
        },
        "sft",
        "--messages conversations",
    ),
    Schema(
        "alpaca",
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        "sft",
        "--template '{instruction} {input}' --response '{output}'",
    ),
    Schema(
        "dolly",
        {"instruction": "How many?", "context": "2 and 2.", "response": "4", "category": "qa"},
        "sft",
        "--template '{context} {instruction}' --response '{response}'",
    ),
    Schema("gsm8k", {"question": "2+2?", "answer": "2+2=4 #### 4"}, "grpo", "--template '{question}'"),
    Schema(
        "verl (gsm8k.parquet)",
        {
            "data_source": "openai/gsm8k",
            "prompt": [user("2+2?")],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 0, "split": "train"},
        },
        "grpo",
        "--messages prompt",
        ".parquet",
    ),
    Schema(
        "DAPO-Math-17k (parquet)",
        {
            "data_source": "math_dapo",
            "prompt": [user("Solve: 2+2. Answer: $Answer")],
            "ability": "MATH",
            "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
        },
        "grpo",
        "--messages prompt",
        ".parquet",
    ),
    Schema(
        "OpenRLHF, messages",
        {"context_messages": [user("2+2?")], "label": "4"},
        "grpo",
        "--messages context_messages",
    ),
    Schema(
        "OpenRLHF, text",
        {"input": "2+2?", "output": "4"},
        "sft",
        "--template '{input}' --response '{output}'",
    ),
    Schema(
        "open-r1 (OpenR1-Math, Numina)",
        {"problem": "2+2?", "solution": "Add them: 4.", "answer": "4"},
        "grpo",
        "--template '{problem}'",
    ),
    Schema(
        "TinyZero countdown", {"nums": [2, 2], "target": 4}, "grpo", "--template 'Make {target} of {nums!s}.'"
    ),
    Schema(
        "messages as JSON text in a table",
        {"prompt": json.dumps([user("2+2?")]), "answer": "4"},
        "grpo",
        "--messages prompt",
        ".csv",
    ),
)


def made(schema: Schema, folder: Path) -> tuple[str, list[str]]:
    """(the text of the first prompt, what is learned of it) with the options as they are typed."""
    import datasets

    datasets.disable_progress_bars()
    path = folder / f"rows{schema.suffix}"
    if schema.suffix == ".jsonl":
        path.write_text(json.dumps(schema.row) + "\n")
    else:
        getattr(datasets.Dataset.from_list([schema.row]), f"to_{schema.suffix[1:]}")(str(path))
    config = load_script(schema.script).Config
    cfg = parsing.parse(config, parsing.qualify(shlex.split(schema.options), config))

    tokenizer = chats.tokenizer(TEMPLATE, end="<end>")
    options = {"template": cfg.template, "system": cfg.system, "max_prompt": cfg.max_prompt}
    options["messages"] = cfg.messages
    if schema.script != "sft":
        prompt = data.load(str(path), tokenizer, **options).prompt(0)
        return tokenizer.decode(prompt.ids), []
    learn = {"response": cfg.response, "loss_on": cfg.loss_on}
    prompt = data.load(str(path), tokenizer, **options, **learn).prompt(0)
    found = data.lessons(prompt, tokenizer, messages=cfg.messages, **learn)
    return tokenizer.decode(prompt.ids), [chats.shown(tokenizer, lesson) for lesson in found]


def table() -> str:
    """The table, in Markdown."""
    lines = ["| data | a row | options | what goes to the model, «what it learns» |", "|---|---|---|---|"]
    for schema in SCHEMAS:
        with tempfile.TemporaryDirectory() as folder:
            prompt, learned = made(schema, Path(folder))
        row = code(json.dumps(schema.row, ensure_ascii=False))
        typed = code(f"{schema.script}.py {schema.options}")
        told = "<br>".join(code(text) for text in learned or [prompt])
        lines.append(f"| {schema.name} | {row} | {typed} | {told} |")
    return "\n".join(lines)


def code(text: str) -> str:
    """Text as it stands, within a cell."""
    return f"`{text}`".replace("|", "\\|")


def page(text: str) -> str:
    """The page with the table of now."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", text, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
