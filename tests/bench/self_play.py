"""Self-play on Kuhn poker, measured: `python tests/bench/self_play.py`.

Runs train_scripts/multi_turn.py, with and without a KL to the first policy, and reads the policy's strategy
off its log-probs every few steps: what the best response wins from it, by enumeration. Writes
docs/results/kuhn_poker.json and .svg; `--draw` only the picture, and the table of docs/environments.md.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from unittest import mock

from record import made, put

import rft_fn as rft
from rft_fn import model, packing
from rft_fn.environment import Renderer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from kuhn import best_payoff, expected_payoff, exploitability, situations  # noqa: E402

RESULTS = ROOT / "docs" / "results"
NAME = "tiny:kuhn_poker"
CASES = {"KL 0.1": {"kl": 0.1}, "no KL": {"kl": 0.0}}
OPTIONS = {"environment": "kuhn_poker", "model": NAME, "algorithm": "dr_grpo", "max_new": 2, "max_turns": 4}
OPTIONS |= {"max_tokens": 64, "prompts": 24, "group": 16, "lr_end": 0.1, "warmup": 3}
OPTIONS |= {"eval_every": 10**6, "eval_prompts": 2}


def table_of(module, tokenizer):
    """((card, actions) -> the probability to bet among legal actions, the most that others get anywhere)."""
    asked = situations(Renderer(tokenizer))
    said = [[*tokenizer.encode(action), tokenizer.eos_token_id] for action in "01"]
    exp = packing.supervised([(ids, action) for ids in asked.values() for action in said])
    packs = packing.shard(exp, 4096)[0]
    apply, params = model.bind(module)
    logp = packing.unpack(model.score(apply, params, packs), packs, exp.w)
    p = (logp * exp.mask).double().sum(-1).exp().view(-1, 2)
    bets = (p[:, 1] / p.sum(-1)).tolist()
    return dict(zip(asked, bets, strict=True)), float(1 - p.sum(-1).min())


def play_of(table):
    """The table as a strategy."""
    return lambda card, actions: table[card, actions]


def average(tables):
    """The mean strategy over time; a decision counts as much as the strategy's own actions lead to it."""
    found = {}
    for card, actions in tables[0]:
        weights = [1.0] * len(tables)
        if actions == "01":
            weights = [1 - table[card, ""] for table in tables]
        total = sum(w * table[card, actions] for w, table in zip(weights, tables, strict=True))
        found[card, actions] = total / max(sum(weights), 1e-9)
    return found


def measures(tables, illegal):
    """What is known of the last of these strategies, and of their mean."""
    play, mean = play_of(tables[-1]), play_of(average(tables))
    return {
        "exploitability": exploitability(play),
        "exploitability_of_mean": exploitability(mean),
        "best_first": best_payoff(play, 0),
        "best_second": best_payoff(play, 1),
        "against_itself": expected_payoff(play, play),
        "illegal": illegal,
        "bets": {f"{card} {actions}".strip(): round(p, 4) for (card, actions), p in tables[-1].items()},
    }


def run(case, steps, every, folder):
    """The measures of a run, every few steps."""
    import multi_turn

    tokenizer = model.load_tokenizer(NAME)
    first, illegal = table_of(model.load(NAME), tokenizer)
    tables = [first]
    rows = [{"step": 0, **measures(tables, illegal)}]
    save = rft.run.Setup.checkpoint
    copy = model.load(NAME)

    def watched(env, state, loop, **more):
        step = loop["step"]
        if step % every == 0:
            copy.load_state_dict(dict(env.st.export(state)), strict=False)
            table, illegal = table_of(copy, tokenizer)
            tables.append(table)
            rows.append({"step": step, **measures(tables, illegal)})
            print(case, step, json.dumps(rows[-1]), flush=True)
        save(env, state, loop, **more)

    options = OPTIONS | CASES[case] | {"steps": steps, "save_every": steps, "out": str(folder)}
    with mock.patch.object(rft.run.Setup, "checkpoint", watched):
        multi_turn.main(multi_turn.Config(**options))
    return rows


def table(found):
    """The first and the last policy of each run."""
    lines = [
        "| | exploitability | the best response wins, first / second seat | against itself, first seat "
        "| exploitability of the mean over time |",
        "|---|---|---|---|---|",
        "| an equilibrium | 0 | -0.056 / 0.056 | -0.056 | |",
    ]
    rows = {"before": found["runs"][next(iter(found["runs"]))]["rows"][0]}
    rows |= {f"{case}, {x['rows'][-1]['step']} steps": x["rows"][-1] for case, x in found["runs"].items()}
    for name, row in rows.items():
        lines.append(
            f"| {name} | **{row['exploitability']:.3f}** "
            f"| {row['best_first']:.3f} / {row['best_second']:.3f} "
            f"| {row['against_itself']:.3f} | {row['exploitability_of_mean']:.3f} |"
        )
    return "\n".join(lines)


def draw(found, path):
    """Exploitability over hands: of each policy, and of the mean so far."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "kuhn"
    fig, axes = plt.subplots(1, len(found["runs"]) + 1, figsize=(11, 3.4))
    for i, (case, x) in enumerate(found["runs"].items()):
        hands = [row["step"] * found["hands"] / 1000 for row in x["rows"]]
        axes[0].plot(hands, [row["exploitability"] for row in x["rows"]], f"C{i}-", label=case, lw=1)
        mean = [row["exploitability_of_mean"] for row in x["rows"]]
        axes[0].plot(hands, mean, f"C{i}--", label=f"{case}, mean over time", lw=1)
        for j, key in enumerate(("j", "q 1", "q 01", "k", "j 0")):
            axes[i + 1].plot(hands, [row["bets"][key] for row in x["rows"]], f"C{j}", label=key, lw=1)
        axes[i + 1].set_title(f"{case}: share of bets", fontsize=9, loc="left")
        axes[i + 1].set_ylim(0, 1)
    axes[0].set_title("exploitability [chips per hand]", fontsize=9, loc="left")
    axes[0].set_ylim(bottom=0)
    for ax in axes:
        ax.set_xlabel("thousand hands", fontsize=8)
        ax.legend(fontsize=7)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "kuhn_poker")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    data = RESULTS / "kuhn_poker.json"
    if not args.draw:
        sys.path.insert(0, str(ROOT / "train_scripts"))
        about = made() | {"options": OPTIONS | {"steps": args.steps}}
        found = about | {"hands": OPTIONS["prompts"] * OPTIONS["group"], "runs": {}}
        for i, case in enumerate(CASES):
            began = time.perf_counter()
            rows = run(case, args.steps, args.every, args.runs / str(i))
            found["runs"][case] = {"seconds": time.perf_counter() - began, "rows": rows}
        data.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(data.read_text())
    draw(found, RESULTS / "kuhn_poker.svg")
    put("docs/environments.md", {"kuhn": table(found)})


if __name__ == "__main__":
    main()
