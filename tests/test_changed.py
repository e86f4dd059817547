"""Which tests `make check` runs for a changed file."""

import changed
import pytest

TESTS = [
    "tests/test_house.py", "tests/test_scan.py", "tests/test_gae.py", "tests/data/test_pairs.py",
    "tests/data/test_data.py", "tests/data/test_sources.py", "tests/scripts/test_ppo.py",
    "tests/kernel/test_triton.py", "tests/kernel/test_products.py",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("rft_fn/scan.py", {"tests/test_scan.py"}),
        ("rft_fn/data/pairs.py", {"tests/data/test_pairs.py"}),
        ("rft_fn/data/__init__.py", {"tests/data/test_data.py"}),
        # no test has its name: all of the room's
        ("rft_fn/data/chat.py", {t for t in TESTS if "/data/" in t}),
        ("kernels/rft_kernels/products.py", {"tests/kernel/test_products.py"}),
        ("train_scripts/ppo.py", {"tests/scripts/test_ppo.py"}),
        ("tests/test_gae.py", {"tests/test_gae.py"}),
        ("README.md", set()),
    ],
)
def test_a_changed_file_calls_for_the_tests_that_mirror_it(name, want):
    assert set(changed.wanted([name], TESTS)) == want | {"tests/test_house.py"}


def test_a_commit_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="base: expected a commit, got nothing-like-it"):
        changed.changed("nothing-like-it")


def test_files_that_git_does_not_know_yet_count():
    assert "tests/changed.py" in changed.changed("4b825dc642cb6eb9a060e54bf8d69288fbee4904")  # the empty tree
