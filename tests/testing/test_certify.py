"""Certificates: a loss of a file, its bias by enumeration, and losses of other libraries."""

import json
import sys
from pathlib import Path

import pytest
import torch

from rft_fn import algorithm, loss, testing, weight
from rft_fn.tools import commands

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
import certificates

FILE = """
import torch, rft_fn as rft
NUMBER = 3
def clipped(out, b): return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv)
def clamped(out, b): return -rft.loss.ratio(out.logp, b.old_logp).clamp(0.8, 1.2) * b.adv
def typo(out, b): return -out.logp * b.advantage
def scalar(out, b): return (out.logp * b.adv).mean()
def halves(mask): return mask.double() / 2
def shares(exp): return {"share": exp.adv.abs().sum(-1)}
def shared(out, b): return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv) + 0 * b.extra["share"]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "my_loss.py").write_text(FILE)
    return f"{tmp_path / 'my_loss.py'}:"


def certify(*args):
    """The exit status of `rft certify`."""
    try:
        commands.main(["certify", *args])
    except SystemExit as end:
        return end.code
    return 0


def test_a_right_loss_is_certified(file, tmp_path, capsys):
    out = str(tmp_path / "c.json")
    assert certify(f"{file}clipped", "--low", "0.2", "--high", "0.2", "--json", out) == 0
    assert "All 9 checks pass, on 3 batches." in capsys.readouterr().out
    found = json.loads(Path(out).read_text())
    assert found["certified"] and found["cause"] == "" and len(found["sha256"]) == 64
    assert [v["passed"] for v in found["verdicts"]] == [True] * 9 and len(found["cases"]) == 3
    assert found["versions"].keys() == {"rft_fn", "torch", "python"}
    at, near, far = found["bias"]
    assert at["bias"] < 1e-12 < near["bias"] < far["bias"]


def test_a_wrong_loss_is_not(file, capsys):
    assert certify(f"{file}clamped") == 1
    assert "1 of 9 checks fail. The likeliest cause: a clip that stops tokens" in capsys.readouterr().out
    assert certify(f"{file}scalar") == 1
    assert "9 of 9 checks fail. The likeliest cause: a mean or a sum inside" in capsys.readouterr().out
    assert certify(f"{file}clipped", "--high", "0.3") == 1


@pytest.mark.parametrize(
    "args",
    [
        ("--weight", "seq_mean"),
        ("--weight", "{}halves"),
        ("--extra", "{}shares"),
        ("--unit", "2"),
        ("--no-policy",),
    ],
)
def test_options_of_a_certificate(file, args, capsys):
    name = "shared" if "--extra" in args else "clipped"
    assert certify(f"{file}{name}", *(x.format(file) for x in args)) == 0
    policy = not {"--unit", "--no-policy"} & {*args}
    assert f"All {9 if policy else 6} checks pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("nothing.py:x", "loss 'nothing.py:x': no such file"),
        ("{}NUMBER", "loss: expected a function of "),
        ("{}missing", "(clamped, clipped, halves, scalar, shared, shares, typo), got 'missing'"),
        (
            "{}typo",
            "my_loss.py:6, def typo(out, b): return -out.logp * b.advantage: AttributeError: Packed has no",
        ),
        ("word", "loss: expected FILE.py:NAME, got 'word'"),
    ],
)
def test_what_is_no_loss_is_one_line(file, capsys, loss, message):
    assert certify(loss.format(file)) == 2
    line = capsys.readouterr().err
    assert message in line and line.count("\n") == 1


def unclipped(out, b):
    return -loss.ratio(out.logp, b.old_logp) * b.adv


def of_sequences(out, b):
    """The exact importance weight of a response."""
    log_ratio = torch.zeros(b.num_seqs).double().index_add(0, b.seq, (out.logp - b.old_logp).detach())
    return -log_ratio.exp()[b.seq] * b.adv * out.logp


def test_only_ratios_of_whole_responses_have_no_bias():
    assert testing.loss_bias(of_sequences, gap=0.5).bias < 1e-12
    assert testing.loss_bias(unclipped).bias < 1e-12
    assert testing.loss_bias(unclipped, gap=0.5).bias > 0.1


def one_number(b, part, batch):
    """A BatchLoss: the mean over the tokens of a micro-batch, averaged over micro-batches."""
    x = loss.ppo_clip(b, part.old_logp, part.adv) * part.mask
    return x.sum() / part.mask.sum().clamp(min=1) * len(part.mask) / len(batch.mask)


RECORD = json.loads(certificates.RESULTS.read_text())
OURS = {
    **{f"TRL, `loss_type={name}`": (certificates.TRL[name], {}) for name in ("grpo", "dr_grpo", "dapo")},
    "TRL, `loss_type=bnpo`": (certificates.TRL["bnpo"], {"informed": False}),
    **{f"verl, `vanilla`, `{name}`": (x, {"dual": 3.0}) for name, x in certificates.MEANS.items()},
    **{
        f"verl, `vanilla`, `{name}`, not told of the batch": (x, {"dual": 3.0, "informed": False})
        for name, x in certificates.MEANS.items()
        if "loss_scale_factor" not in name
    },
}


@pytest.mark.parametrize("name", OURS)
def test_the_certificates_of_other_libraries_are_those_of_our_formulas(name):
    """The recorded numbers are of their code; ours has the same, and so the same bias."""
    published, options = OURS[name]
    formula = certificates.ours(published, **options)
    recorded = RECORD["entries"][name]
    for kind, errors in certificates.measure(formula).items():
        assert [*errors.values()] == pytest.approx(
            [*recorded["micro_batch"][kind].values()], rel=1e-6, abs=1e-9
        )
    of_tokens = testing.token_loss(formula, weight=published.mean)
    for gap, bias in recorded["bias"].items():
        assert testing.loss_bias(of_tokens, gap=float(gap)).bias == pytest.approx(bias, rel=1e-6, abs=1e-9)


def test_published_losses_and_the_micro_batch():
    """What the page says of them."""
    assert RECORD["made"].keys() == {"trl", "verl"} and all("version" in x for x in RECORD["made"].values())
    depend = {
        name
        for name, entry in RECORD["entries"].items()
        if max(x for kind in entry["micro_batch"].values() for x in kind.values()) > 1e-9
    }
    told = {name for name in depend if not name.endswith("not told of the batch")}
    assert told == {
        "TRL, `loss_type=bnpo`", "verl, `vanilla`, `seq-mean-token-sum-norm`", "verl, `clip_cov`",
        "verl, `kl_cov`", "verl, `geo_mean`",
    }  # fmt: skip


def test_rows_of_the_table_have_the_bias_of_the_page():
    """All rows are recorded, no check fails; the bias is computed again."""
    rows = RECORD["rows"]
    assert rows.keys() == algorithm.TABLE.keys() and not any(entry["failed"] for entry in rows.values())
    for name, entry in rows.items():
        for gap, bias in entry["bias"].items():
            again = testing.loss_bias(algorithm.TABLE[name].loss, gap=float(gap)).bias
            assert again == pytest.approx(bias, rel=1e-6, abs=1e-9), name


def test_token_losses_of_a_scalar():
    """Their gradient is the scalar's; a mean of another kind is noticed."""
    right = testing.token_loss(one_number)
    testing.check_all(right, low=0.2, high=0.2)
    with pytest.raises(AssertionError, match="partition"):
        testing.check_all(testing.token_loss(one_number, weight=weight.seq_sum), weight=weight.seq_sum)
    assert testing.loss_bias(right, gap=0.5) == pytest.approx(
        testing.loss_bias(lambda out, b: loss.ppo_clip(out.logp, b.old_logp, b.adv), gap=0.5)
    )
