"""What an evaluation measured: numbers, their intervals, what they depend on, and two models compared."""

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rft_fn
from rft_fn import metric
from rft_fn.file_digest import digest
from rft_fn.model.model_names import resolve
from rft_fn.reward import Reward
from rft_fn.text import printable

__all__ = [
    "Measured",
    "answer_numbers",
    "answers_of",
    "compared",
    "described",
    "model_digest",
    "show",
    "summary",
]

_NONE = ("", "[invalid]")  # texts of an answer that could not be read; the second is of lm-eval's filters


class Measured(NamedTuple):
    """The values of the answers of one model to the problems of one data set or task."""

    name: str
    value: Tensor  # [N, G] f64, 1 where an answer is right
    answer: Tensor | None  # [N, G] i64, equal for equal answers, -1 for none; None where they are not known
    further: Mapping[str, float]  # other numbers, without an interval
    protocol: Mapping[str, Any]  # what the values depend on
    reported: float | None = None  # the number by the harness itself, of the first answers
    rows: Sequence[Mapping[str, Any]] = ()  # each response

    def each(self, ks: Sequence[int]) -> dict[str, Tensor]:
        """Return avg@G, and pass@k and maj@k for each k where values are right or wrong, per problem [N]."""
        size = self.value.shape[1]
        found = {f"avg@{size}": self.value.mean(-1)}
        if not bool(((self.value == 0) | (self.value == 1)).all()):
            return found
        right = self.value == 1
        found |= {f"pass@{k}": metric.pass_at_k(right, k) for k in ks}
        if self.answer is not None:
            found |= {f"maj@{k}": metric.maj_at_k(right, self.answer, k) for k in ks if k > 1}
        return found


def answer_numbers(answers: Sequence[Sequence[Hashable]]) -> Tensor | None:
    """Return numbers [N, G] that are equal for equal answers to a problem, -1 for an answer without text.

    None where no answer is a text.
    """
    if not any(isinstance(x, str) for row in answers for x in row):
        return None
    rows = []
    for row in answers:
        known: dict[str, int] = {}
        texts = [x.strip() if isinstance(x, str) else "" for x in row]
        rows.append([-1 if text in _NONE else known.setdefault(text, len(known)) for text in texts])
    return torch.tensor(rows)


def answers_of(reward: Reward, texts: Sequence[str], group: int) -> Tensor | None:
    """Return the numbers [N, G] of the answers that a reward reads in responses; None if it reads none."""
    if reward.answer is None:
        return None
    read = [reward.answer(text) for text in texts]
    return answer_numbers([read[at : at + group] for at in range(0, len(read), group)])


def summary(measured: Measured, ks: Sequence[int], seed: int, *, model: str) -> dict[str, Any]:
    """Return the means over problems as "result", their 95 % intervals as "interval", and the protocol."""
    each = measured.each(ks)
    bounds = _bounds(measured.value)
    count, size = measured.value.shape
    protocol = {
        "model": model,
        "digest": model_digest(model),
        **measured.protocol,
        "problems": count,
        "samples per problem": size,
        "seed": seed,
        "interval": "95 %, bootstrap over problems",
        "rft_fn": rft_fn.__version__,
    }
    return {
        "result": {name: x.mean().item() for name, x in each.items()}
        | {"questions": len(measured.value), **measured.further},
        "interval": {name: metric.bootstrap(x, seed=seed, bounds=bounds) for name, x in each.items()},
        "protocol": protocol,
        "reported": measured.reported,
    }


def compared(one: Measured, other: Measured, ks: Sequence[int], seed: int) -> dict[str, Any]:
    """Return how much `one` is better than `other` on the same problems and draws, with 95 % intervals."""
    if one.value.shape != other.value.shape:
        raise ValueError(
            f"beside: expected the same {len(one.value)} problems for both models, got {len(other.value)}; "
            "prompts that are too long for one of them are dropped"
        )
    theirs = other.each(ks)
    low, high = _bounds(torch.cat([one.value, other.value]))
    found = {}
    for name, x in one.each(ks).items():
        if name in theirs:
            gain = x - theirs[name]
            found[name] = [
                gain.mean().item(),
                *metric.bootstrap(gain, seed=seed, bounds=(low - high, high - low)),
            ]
    return found


def _bounds(value: Tensor) -> tuple[float, float]:
    """Return the range of values: that of shares, or wider where some are beyond it."""
    return min(0.0, value.min().item()), max(1.0, value.max().item())


def model_digest(name: str) -> str | None:
    """Return a short digest of the weights of a model in a folder; None of one on a hub."""
    folder = Path(resolve(name))
    files = sorted(x for kind in ("*.safetensors", "*.bin", "*.gguf") for x in folder.glob(kind))
    whole = hashlib.blake2b(digest_size=8)
    for file in files:
        whole.update(f"{file.name} {digest(file)}\n".encode())
    return whole.hexdigest() if files else None


def described(protocol: Mapping[str, Any]) -> list[str]:
    """Return the protocol as lines of a terminal."""
    lines = []
    for name, x in protocol.items():
        text = json.dumps(x, ensure_ascii=False)
        text = text[1:-1] if isinstance(x, str) else text
        lines.append(f"  {name}: {text if len(text) <= 100 else f'{text[:60]} ... {text[-30:]}'}")
    return lines


def show(title: str, report: Mapping[str, Any]) -> None:
    """Print the numbers of a `summary` with their intervals, the comparison if any, and the protocol."""
    lines = [title]
    width = max(map(len, report["result"]))
    for name, x in report["result"].items():
        text = f"{x:.4f}" if isinstance(x, float) else str(x)
        if name in report["interval"]:
            low, high = report["interval"][name]
            text += f"  [{low:.4f}, {high:.4f}]"
        if name in report.get("difference", {}):
            beside = report["beside"]["result"][name]
            gain, low, high = report["difference"][name]
            text += f"  beside {beside:.4f}, difference {gain:+.4f}  [{low:+.4f}, {high:+.4f}]"
        lines.append(f"  {name:<{width}}  {text}")
    lines += [" protocol", *described(report["protocol"])]
    if "beside" in report:
        ours, theirs = report["protocol"], report["beside"]["protocol"]
        other = {name: x for name, x in theirs.items() if ours.get(name) != x}
        lines += [" of the model beside it", *described(other)]
    print("\n".join(printable(line) for line in lines))
