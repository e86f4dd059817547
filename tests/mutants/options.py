"""Mutants of limits, run folders, signals and scripts: each with the test that notices it."""

CHECK, FOLDER, SIGNALS = "rft_fn/check.py", "rft_fn/run/folder.py", "rft_fn/run/signals.py"
LOG = "tests/run/test_log.py::"

MUTANTS = [
    (
        "NaN is inside of every range",
        CHECK,
        "float\n            return False",
        "float\n            return True",
        "tests/test_check.py::test_an_option_outside_of_its_limits_is_named",
    ),
    (
        "an open limit is closed",
        CHECK,
        "(x == self.low and self.open_low) or ",
        "",
        "tests/test_check.py::test_an_option_outside_of_its_limits_is_named",
    ),
    (
        "True is an integer",
        CHECK,
        "right = isinstance(x, kind) and (hint is bool or not isinstance(x, bool))",
        "right = isinstance(x, kind)",
        "tests/test_check.py::test_an_option_outside_of_its_limits_is_named",
    ),
    (
        "no option of a part is free",
        CHECK,
        'found |= {f"{name}.{inner}" for inner in free(hint)}',
        "found |= set()",
        LOG + "test_what_does_not_change_the_mathematics_is_free",
    ),
    (
        "an override is not noted",
        FOLDER,
        'self._append("overrides.jsonl", {"step": step, "name": name, "old": old, "new": new})',
        "pass",
        LOG + "test_an_override_is_noted_with_its_step",
    ),
    (
        "every change is refused, with --override too",
        FOLDER,
        "if self._changed and not override:",
        "if self._changed:",
        LOG + "test_an_override_is_noted_with_its_step",
    ),
    (
        "rows are wiped when the checkpoints are gone",
        FOLDER,
        'if step == 0 and (self.folder / ".saved").exists():',
        "if False:",
        LOG + "test_rows_are_not_wiped_when_the_checkpoints_are_gone",
    ),
    (
        "a run that never had a checkpoint cannot start again",
        FOLDER,
        'any(self.checkpoints.glob("step_*"))',
        "True",
        LOG + "test_a_run_that_had_no_checkpoint_yet_starts_again",
    ),
    (
        "the config is written at every start",
        FOLDER,
        "if not path.exists() or path.read_text() != text:",
        "if True:",
        LOG + "test_config_is_written_when_it_is_new_and_whole",
    ),
    (
        "a file is written in place",
        "rft_fn/run/files.py",
        'tmp = path.with_name(f".{path.name}.tmp")',
        "tmp = path",
        LOG + "test_config_is_written_when_it_is_new_and_whole",
    ),
    (
        "the folder is not locked",
        "rft_fn/run/lock.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        LOG + "test_two_runs_in_one_folder",
    ),
    (
        "runs of one name are one at wandb",
        "rft_fn/run/trackers.py",
        'return f"{folder.resolve().name}-{digest}"',
        'return f"{folder.resolve().name}-"',
        LOG + "test_other_trackers_are_called_as_they_expect",
    ),
    (
        "the notes of an error are dropped",
        "rft_fn/run/cli.py",
        "    if not notes:\n        return line",
        "    if notes:\n        return line",
        LOG + "test_notes_of_an_error_are_in_its_line",
    ),
    (
        "a second signal is as patient as the first",
        SIGNALS,
        'if asked and now - _state["when"] > _AGAIN:',
        "if False:",
        LOG + "test_a_second_signal_stops_at_once",
    ),
    (
        "a signal before the first step waits for it",
        SIGNALS,
        'if not _state["steps"]:',
        "if False:",
        LOG + "test_a_signal_before_the_first_step_is_one_line",
    ),
]
