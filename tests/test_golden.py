"""Golden numbers: TRL's own losses, gradients and advantages against our calls, and the table that says which
equals which."""

import json
import re

import pytest
import torch
from golden import batch, compare, make_table
from golden.equivalence import ROWS

import rft_fn

pytestmark = pytest.mark.usefixtures("float64")
ENTRIES = compare.GOLDEN["entries"]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_our_call_gives_their_number(row):
    """The value, and the gradient of every leaf: log-probs, entropies, values, scores, logits."""
    (theirs, their_grads), (ours, our_grads) = compare.recorded(row), compare.evaluate(row, row.ours)
    if row.value:
        torch.testing.assert_close(ours, theirs, rtol=row.tol, atol=row.tol * theirs.abs().max().item())
    for name, grad in their_grads.items():
        assert grad.norm() > 0
        torch.testing.assert_close(our_grads[name], grad, rtol=0, atol=row.tol * grad.abs().max().item())


@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.paper], ids=lambda r: r.key)
def test_where_they_differ_they_differ(row):
    """A row that names the paper's call as another one is not the same in disguise, and says in words why."""
    assert compare.against(row, row.paper).error > 1e-5 and row.differs


def test_every_entry_has_a_row_and_every_row_an_entry():
    assert {row.key for row in ROWS.values()} == set(ENTRIES)


def test_the_batch_is_the_one_that_was_recorded():
    assert json.loads(json.dumps(batch.make())) == compare.GOLDEN["inputs"]


def test_the_batch_reaches_every_branch():
    """Clipped and not, both signs, ratios beyond the caps, a group without a preference, unequal rows."""
    x = compare.batch()
    mask, rho = x["mask"], (x["logp"] - x["old_logp"]).exp()
    up, sampled = x["adv"] > 0, (x["old_logp"] - x["sampler_logp"]).exp()
    for sign in (up, ~up & mask):
        for outside in (rho < 0.8, rho > 1.28, (rho > 0.8) & (rho < 1.2)):
            assert (sign & outside & mask).any()
    assert (sampled[mask] > 3).any() and (sampled[mask] < 0.5).any()
    assert (x["reward"][0].std(-1) == 0).any() and len(set(x["length"].tolist())) > 3
    tokens = [v for v in x.values() if v.shape == mask.shape]
    assert len(tokens) >= 9 and not any(v[~mask].any() for v in tokens)


def test_numbers_only():
    """Nothing of TRL's but numbers: an entry is its options, what was called (path and name), and floats."""
    for entry in ENTRIES.values():
        assert set(entry) <= {"part", "settings", "called", "loss", "grad", "value"}
        assert all(re.fullmatch(r"trl/[\w/]+\.py: [\w.]+", called) for called in entry["called"])
        numbers = [x for v in (entry.get("value", []), *entry.get("grad", {}).values()) for x in v]
        assert all(isinstance(x, float) for x in numbers) and numbers
    assert compare.GOLDEN["licence"] == "Apache-2.0" and set(compare.GOLDEN["made"]) == {"current", "dropped"}


def test_length_weighted_gspo():
    """Sequence-level ratios under a token mean: a response's gradient times its share of the tokens."""
    entries = [ENTRIES[f"grpo/gspo {loss_type}"]["grad"]["logp"] for loss_type in ("dapo", "grpo")]
    dapo, grpo = (torch.tensor(x) for x in entries)
    length = torch.tensor(compare.GOLDEN["inputs"]["length"])
    share = (length / length.sum() * len(length)).repeat_interleave(length)
    torch.testing.assert_close(dapo, share * grpo, rtol=1e-10, atol=1e-14)


def test_four_micro_batches_are_one_batch_except_where_the_table_says_so():
    """Of TRL's own numbers: bnpo, the entropy bonus and the entropy mask depend on the cut, no other does."""
    cut = {k: k.removesuffix(", 4 micro-batches") for k in ENTRIES if k.endswith(", 4 micro-batches")}
    grad = lambda k: torch.cat([torch.tensor(g) for g in ENTRIES[k]["grad"].values()])  # noqa: E731
    differ = {whole for k, whole in cut.items() if compare.relation(grad(k), grad(whole)).error > 1e-12}
    assert differ == {"grpo/bnpo", "grpo/entropy bonus", "grpo/high entropy"}


def test_the_table_of_the_docs_is_current():
    text = make_table.PAGE.read_text()
    assert make_table.page(text) == text, "cd tests && python -m golden.make_table"


@pytest.mark.parametrize("row", make_table.FIELD["rows"], ids=lambda r: f"{r['system']}: {r['setting']}")
def test_recorded_rows_name_calls_that_exist_and_say_where_they_are_from(row):
    for module, name in re.findall(r"\b(weight|loss|advantage)\.(\w+)", row["ours"]):
        assert callable(getattr(getattr(rft_fn, module), name))
    assert re.search(r"\b(loss|weight|advantage)\.", row["ours"]) and row["commit"] and row["date"]
    assert row["evidence"] in ("run", "read", "default read, estimator run")
    assert row["differs"] or (row["error"] is not None and row["error"] < 1e-8)
