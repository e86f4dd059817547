"""Mutants of error lines, which their page has to notice."""

PAGE = "tests/test_troubleshooting.py::"

MUTANTS = [
    (
        "a message changes, and its row stays",
        "rft_fn/weight.py",
        "mask: expected an even number of rows, two per pair",
        "mask: expected two rows per pair",
        PAGE + "test_every_line_has_a_row",
    ),
    (
        "a row loses its remedy",
        "docs/troubleshooting/maths.md",
        "**Remedy:** Give both sides of every pair",
        "Give both sides of every pair",
        PAGE + "test_every_row_has_a_cause_and_a_remedy_and_is_there_once",
    ),
    (
        "a missing vLLM ends with a traceback",
        "rft_fn/engine/vllm/package.py",
        "raise ModuleNotFoundError(",
        "raise ImportError(",
        PAGE + "test_a_missing_package_ends_a_script_with_one_line",
    ),
]
