"""Golden numbers: losses, gradients and advantages of other systems against our calls, and the table of which
equals which."""

import itertools
import json
import re

import pytest
import torch
from golden import batch, compare, make_table, scales
from golden.equivalence import ROWS
from golden.other_rows import OTHERS, VERL

import rft_fn
from rft_fn import loss, weight

pytestmark = pytest.mark.usefixtures("float64")
ENTRIES, SCALED = compare.GOLDEN["entries"], compare.SCALED["entries"]
OTHER_ROWS = [row for rows in OTHERS.values() for row in rows]
AT_SCALES = [row for row in [*ROWS.values(), *OTHER_ROWS] if row.key in SCALED]
PAIRS = ("dpo", "kto", "cpo", "orpo", "a2po")  # no log-probs of an old policy in these
STOPPED = [0.0, 0.24, 0.44]  # in docs/algorithms.md


def part(row):
    """The part of another system that a row's key begins with: "grpo", "verl" ..."""
    return row.key.split("/")[0]


def by_part(rows):
    """One case for each part, with the list of its rows."""
    parts = {}
    for row in rows:
        parts.setdefault(part(row), []).append(row)
    return pytest.mark.parametrize("rows", parts.values(), ids=parts)


@by_part(ROWS.values())
def test_our_call_gives_their_number(rows):
    """The value, and the gradient of every leaf: log-probs, entropies, values, scores, logits."""
    for row in rows:
        (theirs, their_grads), (ours, our_grads) = compare.recorded(row), compare.evaluate(row, row.ours)
        if row.value:
            close(ours, theirs, row.tol, row.key, relative=row.tol)
        for name, grad in their_grads.items():
            assert grad.norm() > 0, row.key
            close(our_grads[name], grad, row.tol, f"{row.key}, {name}")


def close(ours, theirs, tol, title, relative=0.0):
    """Raise where two vectors differ by more than `tol` times the largest entry of theirs."""
    bound = tol * theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, rtol=relative, atol=bound, msg=lambda said: f"{title}: {said}")


def test_where_they_differ_they_differ():
    """A row that names the paper's call as another one is not the same in disguise, and says in words why."""
    rows = [row for row in ROWS.values() if row.paper]
    assert rows
    offenders = [r.key for r in rows if compare.against(r, r.paper).error <= 1e-5 or not r.differs]
    assert not offenders, offenders


@by_part(AT_SCALES)
def test_our_call_gives_their_gradient_at_every_scale(rows):
    """With tool tokens in the middle of responses and a response without any token of the policy."""
    for row, scale in itertools.product(rows, batch.SCALES):
        theirs, ours = compare.at_scale(row, row.ours, scale)
        assert theirs.norm() > 0, row.key
        close(ours, theirs, row.tol, f"{row.key} at scale {scale}")


def test_where_other_systems_differ_they_differ():
    for row in (row for row in OTHER_ROWS if row.paper):
        errors = [compare.relation(*compare.at_scale(row, row.paper, scale)).error for scale in batch.SCALES]
        assert max(errors) > 1e-2 and row.differs, row.key


def test_verl_clips_twice_and_small_ratios_do_not_show_it():
    """The second clip stops ratios above 3 and no others: equality at scale 0.05 tells nothing of it."""
    rows = [row for row in VERL if row.key.startswith("verl/vanilla")]
    assert len(rows) == 5 and all("dual=3.0" in row.ours[0][1] for row in rows)
    for row in rows:
        small, middle, large = (compare.relation(*compare.at_scale(row, row.paper, s)) for s in batch.SCALES)
        assert max(small.error, middle.error) <= row.tol and large.error > 0.5


@by_part(AT_SCALES)
def test_a_response_without_tokens_counts_where_the_table_says_so(rows):
    """A dagger is a factor of 15 / 16; a row without one has none. (Entropy is a mean of tokens.)"""
    for row in rows:
        theirs, ours = compare.at_scale(row._replace(counts=False), row.ours, 0.3)
        found = compare.relation(theirs, ours)
        factor = 15 / 16 if "†" in make_table.scales(row) else 1
        assert found.norm == pytest.approx(factor, abs=1e-4), row.key
        assert found.cosine == pytest.approx(1, abs=1e-6), row.key


def test_the_scaled_batches_are_those_that_were_recorded():
    assert scales.inputs() == compare.SCALED["inputs"]


def test_every_entry_has_a_row_and_every_row_an_entry():
    assert {row.key for row in ROWS.values()} == set(ENTRIES)
    of_policies = {
        k for k, entry in ENTRIES.items() if "logp" in entry.get("grad", {}) and not k.startswith(PAIRS)
    }
    assert {row.key for row in AT_SCALES} == set(SCALED) == of_policies | {row.key for row in OTHER_ROWS}


def test_the_batch_is_the_one_that_was_recorded():
    assert json.loads(json.dumps(batch.make())) == compare.GOLDEN["inputs"]


def test_numbers_only():
    """Nothing of TRL's but numbers: an entry is its options, what was called (path and name), and floats."""
    for entry in ENTRIES.values():
        assert set(entry) <= {"part", "settings", "called", "loss", "grad", "value"}
        assert all(re.fullmatch(r"trl/[\w/]+\.py: [\w.]+", called) for called in entry["called"])
        numbers = [x for v in (entry.get("value", []), *entry.get("grad", {}).values()) for x in v]
        assert all(isinstance(x, float) for x in numbers) and numbers
    for entry in SCALED.values():
        assert set(entry) == {"part", "variant", "grad"} and set(entry["grad"]) == set(map(str, batch.SCALES))
        leaves = [g for at in entry["grad"].values() for g in at.values()]
        assert leaves and all(isinstance(x, float) for g in leaves for x in g)
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


def test_clip_cov_draws_from_stopped_tokens_too():
    """Which verl leaves out of the draw. Of the tokens in the band 0, 24 and 44 % are stopped already."""
    generator, shares = torch.Generator().manual_seed(0), []
    for scale in batch.SCALES:
        logp = -torch.randn(64, 625, generator=generator).abs() - 0.05
        old_logp = (logp + scale * torch.randn(64, 625, generator=generator)).clamp(max=-0.01)
        adv = torch.randn(64, 1, generator=generator).expand(64, 625).contiguous()
        mask = torch.ones(64, 625, dtype=torch.bool)
        w = weight.token_mean(mask)
        band = weight.clip_cov(w, weight.covariance(logp, adv, mask), mask, 1, share=1.0) != w
        grad = torch.func.grad(lambda x, o=old_logp, a=adv: loss.ppo_clip(x, o, a).sum())(logp)
        shares.append(((grad == 0) & band).sum() / band.sum())
    assert [round(x.item(), 2) for x in shares] == STOPPED


def test_the_table_of_the_docs_is_current():
    text = make_table.PAGE.read_text()
    assert make_table.page(text) == text, "cd tests && python -m golden.make_table"


def test_recorded_rows_name_calls_that_exist_and_say_where_they_are_from():
    for row in make_table.FIELD["rows"]:
        title = f"{row['system']}: {row['setting']}"
        for module, name in re.findall(r"\b(weight|loss|advantage)\.(\w+)", row["ours"]):
            assert callable(getattr(getattr(rft_fn, module), name)), title
        assert re.search(r"\b(loss|weight|advantage)\.", row["ours"]) and row["commit"] and row["date"], title
        assert row["evidence"] in ("run", "read", "default read, estimator run"), title
        assert row["differs"] or (row["error"] is not None and row["error"] < 1e-8), title
