"""What `rft migrate` makes of objectives of other libraries, against gradients of their own code."""

import inspect
import json

import pytest
import torch
from golden import batch, objectives, objectives_page
from golden.objectives import CONFIGS
from golden.scales import digest

from rft_fn import algorithm, weight
from rft_fn.migrate.libraries import LIBRARIES
from rft_fn.migrate.objective_rows import ERRORS, ROWS, Objective, arguments
from rft_fn.migrate.translation import translate

pytestmark = pytest.mark.usefixtures("float64")
SAME = 1e-3  # TRL's eps beside the deviation makes 1.5e-4
WHITENED = 0.01  # 1 / (2 tokens), of their deviation
PARTS = sorted({key.partition("/")[0] for key in CONFIGS})


@pytest.mark.parametrize("part", PARTS)
def test_a_command_has_their_gradient_or_a_note_says_by_how_much_not(part):
    """At three scales of log-ratios, with tool tokens in the middle, and one response without a token."""
    recorded = objectives.read()["entries"]
    for key in (key for key in CONFIGS if key.partition("/")[0] == part):
        found = objectives.errors(key, recorded[key])
        said = " ".join(objectives.migrated(key)[1])
        if max(found) < SAME:
            assert "error of the gradient" not in said, key
        elif max(found) < WHITENED and "over n - 1" in said:
            continue
        elif not any(any(grad) for grad in recorded[key]["grad"].values()):
            assert "so is its gradient" in said, key
        else:
            assert f"0.05, 0.3, 1.5: {', '.join(f'{e:.2g}' for e in found)}" in said, (key, found)


def test_every_error_in_a_note_was_measured():
    assert {key.removesuffix(", smoothed") for key in CONFIGS} >= set(ERRORS)


def test_the_batches_are_those_that_were_recorded():
    inputs = {str(scale): digest(batch.scaled(scale)) for scale in batch.SCALES}
    assert objectives.read()["inputs"] == inputs
    assert set(objectives.read()["entries"]) == set(CONFIGS)


def test_the_rows_are_those_of_the_table():
    mask = torch.tensor([[True, True], [True, False]])
    limits = {}
    for name, row in ROWS.items():
        assert arguments(row) == [f"--algorithm {name}"]
        own = algorithm.TABLE[name]
        torch.testing.assert_close(own.weight(mask), weight.get_weight(row.weight)(mask))
        if isinstance(own, algorithm.Algorithm):
            assert own.advantage is algorithm.TABLE[row.advantage].advantage
        limits.setdefault(row.loss, []).append(list(inspect.signature(own.loss).parameters))
    assert all(each == same[0] for same in limits.values() for each in same)
    composed = arguments(Objective("rloo", "gspo", "seq_sum", {"low": 0.1, "high": -0.5, "dual": None}))
    assert composed == [
        "--algorithm gspo", "--advantage rloo", "--weight seq_sum", "--loss.low 0.1", "--loss.high -0.5",
    ]  # fmt: skip


A = "actor_rollout_ref.actor."
V, MODE = {"actor_rollout_ref.rollout.n": 4}, A + "policy_loss.loss_mode"
NEAR = {"epsilon": 3e-4, "epsilon_high": 4e-4}
EST, IS = "algo.advantage.estimator", "algo.advantage.is_correction_level"
DAPO = "--algorithm dapo --clip-low 0.2 --clip-high 0.2"
WRONG = [
    ("trl", "rl", {"loss_type": "cispo"}, "--algorithm cispo --loss.low 1 --loss.high -0.8", ""),
    (
        "trl", "rl", {"loss_type": "cispo", "epsilon_high": 5},
        "--algorithm cispo --clip-low 1 --clip-high 4", "",
    ),
    (
        "trl", "rl", {"importance_sampling_level": "sequence", **NEAR},
        "--algorithm gspo --weight token_mean --clip-low 0.0003 --clip-high 0.0004", "",
    ),
    (
        "trl", "rl", {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        "--algorithm gspo --weight seq_sum --clip-low 0.2 --clip-high 0.2", "",
    ),
    ("openrlhf", "rl", {EST: "group_norm"}, DAPO, ""),
    *(
        (
            "verl", "rl", {**V, "algorithm.adv_estimator": name},
            f"--algorithm dapo --advantage {name} --clip-low 0.2 --clip-high 0.2 --dual 3.0", "",
        )
        for name in ("rloo", "opo", "remax")
    ),
    ("trl", "dpo", {"loss_type": "ipo"}, "--loss ipo --average", ""),
    (
        "trl", "dpo", {"loss_type": "sigmoid", "label_smoothing": 0.1}, "--loss dpo",
        "label_smoothing: sigmoid does not read it; --loss cdpo --label-smoothing does",
    ),
    ("trl", "rl", {"loss_type": "sapo"}, "--algorithm sapo", ""),
    *(
        ("verl", "rl", {**V, "algorithm.adv_estimator": "grpo", MODE: mode}, wanted, "")
        for mode, wanted in {
            "gspo": "--algorithm gspo --weight token_mean --clip-low 0.2 --clip-high 0.2",
            "cispo": "--algorithm cispo --clip-low 0.2 --clip-high 0.2",
            "geo_mean": "--algorithm gmpo --clip-low 0.2 --clip-high 0.2",
            "sapo": "--algorithm sapo",
        }.items()
    ),
    (
        "openrlhf", "rl", {EST: "rloo", "actor.eps_clip": 0.3},
        "--algorithm dapo --advantage rloo --clip-low 0.3 --clip-high 0.3", "",
    ),
    (
        "openrlhf", "rl", {EST: "reinforce"}, "--algorithm reinforce_pp --clip-low 0.2 --clip-high 0.2",
        "over n - 1",
    ),
    (
        "openrlhf", "rl", {EST: "group_norm", IS: "token"},
        f"{DAPO} --mismatch icepop --floor 0.5 --cap 5", "",
    ),
    (
        "openrlhf", "rl",
        {
            "advantage_estimator": "group_norm", "enable_vllm_is_correction": "true",
            "vllm_is_correction_type": "icepop", "vllm_is_truncated_threshold": "0.4 3",
        },
        f"{DAPO} --mismatch icepop --floor 0.4 --cap 3", "",
    ),
    (
        "trl", "rl", {"importance_sampling_level": "sequence_token", "loss_type": "grpo"},
        "--algorithm gspo_token --clip-low 0.2 --clip-high 0.2", "",
    ),
    ("trl", "dpo", {"loss_type": "robust"}, "--loss dpo", ""),
    ("trl", "dpo", {"loss_type": "aot"}, "--loss dpo", "sorted log-ratios of a whole batch"),
]  # fmt: skip
VLLM, MODES = {"use_vllm": True}, "vllm_importance_sampling_"
CORRECTED = "algorithm.rollout_correction."
THEIRS = {
    "trl": {}, "verl": {**V, "algorithm.adv_estimator": "grpo"},
    "openrlhf": {EST: "group_norm", "rollout.n_samples_per_prompt": 4},
}  # fmt: skip
CORRECTIONS = [
    ("trl", VLLM, "--mismatch mis_seq --cap 3", ""),
    ("trl", {**VLLM, MODES + "correction": False}, "--mismatch none", ""),
    (
        "trl", {**VLLM, MODES + "mode": "sequence_truncate", MODES + "cap": 2},
        "--mismatch tis_seq --cap 2", "",
    ),
    (
        "trl", {**VLLM, MODES + "mode": "token_mask", MODES + "clip_min": 0.5},
        "--mismatch icepop --cap 3 --floor 0.5", "",
    ),
    ("trl", {**VLLM, MODES + "clip_min": 0.5}, "--mismatch mis_seq --cap 3", "--floor: mis_seq has none"),
    ("verl", {CORRECTED + "rollout_is": "sequence"}, "--mismatch tis_seq --cap 2", ""),
    (
        "verl",
        {
            CORRECTED + "rollout_is": "token", CORRECTED + "rollout_is_threshold": 4,
            CORRECTED + "rollout_rs": "seq_mean_k1", CORRECTED + "rollout_rs_threshold": "0.8_1.6",
        },
        "--mismatch tis --cap 4 --geo-low 0.625 --geo-high 1.25", "takes dropped responses out of the mean",
    ),
    ("verl", {CORRECTED + "rollout_rs": "token_k3", CORRECTED + "rollout_rs_threshold": 2}, "", "within"),
    (
        "verl", {CORRECTED + "rollout_is": "token", CORRECTED + "rollout_is_threshold": "0.4_6"},
        "--mismatch icepop --cap 6 --floor 0.4", "",
    ),
    (
        "verl", {CORRECTED + "rollout_is": "sequence", CORRECTED + "rollout_is_threshold": "0.4_6"},
        "--mismatch mis_seq --cap 6", "whole ratio below 0.4 too",
    ),
    ("verl", {CORRECTED + "bypass_mode": True}, "--mismatch none", ""),
    (
        "openrlhf", {IS: "seq", f"{IS[:-5]}threshold": [0.9, 1.1]},
        "--mismatch tis --cap 1000000 --geo-low 0.9 --geo-high 1.1", "",
    ),
    ("openrlhf", {IS: "token", "actor.policy_loss_type": "gspo"}, "--mismatch none", ""),
    (
        "openrlhf", {IS: "seq", f"{IS[:-5]}gating": "binary_kl", f"{IS[:-5]}threshold": 0.01},
        "--mismatch tis --cap 1000000", "drops responses by the mean of a divergence (binary_kl, 0.01)",
    ),
]  # fmt: skip


def test_objectives_that_were_translated_wrong():
    """As their own code has them, with limits that the row has, and accepted by the script."""
    for library, kind, options, wanted, note in WRONG:
        found = translate(LIBRARIES[library], options, (), kind)
        assert objectives_page.objective_of(" ".join(found.command)) == wanted, options
        assert note in " ".join(found.notes), options
        assert not [x for x in found.notes if x.startswith("left out: --loss")], found.notes


def test_corrections_of_the_mismatch():
    """equivalence.py and other_rows.py have what equals what."""
    for library, options, wanted, note in CORRECTIONS:
        found = translate(LIBRARIES[library], THEIRS[library] | options, (), "rl")
        own = [x for x in found.command if x.startswith(("--mismatch", "--cap", "--floor", "--geo"))]
        assert " ".join(own) == wanted, options
        assert note in " ".join(found.notes), found.notes
        assert not [x for x in found.notes if x.startswith("left out: --")], found.notes


def test_the_page_of_objectives_is_current():
    """Its commands are today's."""
    results = json.loads(objectives_page.RESULTS.read_text())
    assert list(results) == list(CONFIGS)
    assert objectives_page.page(results) == objectives_page.PAGE.read_text()
    for key, x in results.items():
        now = objectives_page.objective_of(objectives.migrated(key)[0])
        assert objectives_page.objective_of(x["command"]) == now, (
            "cd tests && python -m golden.objectives_page"
        )
