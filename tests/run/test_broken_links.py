"""A link between hosts that breaks: a run goes on with equal bytes, or ends with a line and resumes."""

import re

import fake_slurm
import pytest
import three_hosts

from rft_fn import dist

pytestmark = pytest.mark.slow

SHORT = [
    ("generate", 2, 4, 3),
    ("train", 2, 3, 3),
    ("save", 1, 3, 3),
    ("sync", 4, 4, 3),
]  # of rank 1, the server


@pytest.mark.skipif(not fake_slurm.namespaces(), reason="this machine lets nobody make network namespaces")
def test_a_run_outlives_short_breaks_and_names_who_a_long_one_took(tmp_path):
    """Breaks in a rollout, a step, a checkpoint and a transfer of weights; then one for good."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    assert [code for code, *_ in three_hosts.run(whole)] == [0, 0]

    found = three_hosts.run(broken, [*SHORT, ("train", 4, 3, None)], options="--timeout 8 --engine-timeout 8")
    assert found[0][0] == 1, found  # torchrun's; that of the host without a link waits for its store
    for rank, (_, text, seconds) in enumerate(found):
        line = next(x for x in text.splitlines() if x.startswith("error: "))
        want = rf"error: lost rank {1 - rank} on node{3 - rank} \(last in .*, \d+ s ago\); "
        assert re.match(rf"{want}rank {rank} was in (train|forward of step 4); run the same command", line), (
            line
        )
        assert 8 <= seconds < 40, found
    assert f"exitcode  : {dist.LOST}" in found[0][1]
    rows = [x / "run/metrics.jsonl" for x in (broken, whole)]
    assert rows[0].read_bytes() == b"".join(rows[1].read_bytes().splitlines(True)[:3])

    assert [code for code, *_ in three_hosts.run(broken)] == [0, 0]  # the link is there again
    assert rows[0].read_bytes() == rows[1].read_bytes()
    weights = [x / "run/model/model.safetensors" for x in (broken, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
