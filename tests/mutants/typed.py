"""Mutants of the command line and of what a script says when it ends early."""

CLI, PARSING, SIGNALS = "rft_fn/run/cli.py", "rft_fn/run/parsing.py", "rft_fn/run/signals.py"
SAVE, LORA, SOURCES = "rft_fn/model/save.py", "rft_fn/model/lora.py", "rft_fn/data/sources.py"
EXPORT, SWEEP = "train_scripts/export.py", "train_scripts/sweep.py"
SCRIPTS = "tests/scripts/test_scripts.py::"

MUTANTS = [
    (
        "the title of the parser's box is taken for what is wrong",
        PARSING,
        "text.splitlines()[1:]",
        "text.splitlines()",
        f"{SCRIPTS}test_what_is_typed_wrong_is_one_line",
    ),
    (
        "None is not named among the values of an option",
        PARSING,
        'want += ", or None"',
        'want += ""',
        f"{SCRIPTS}test_what_is_typed_wrong_is_one_line",
    ),
    (
        "a request to stop that a library catches is told as the library's error",
        CLI,
        "            signals.check_early()",
        "            pass",
        f"{SCRIPTS}test_a_request_to_stop_that_a_library_catches_still_stops",
    ),
    (
        "a request to stop that a library swallows is forgotten",
        SIGNALS,
        '    check_early()\n    _state["steps"]',
        '    _state["steps"]',
        f"{SCRIPTS}test_a_request_to_stop_that_a_library_catches_still_stops",
    ),
    (
        "half a model is left by a full disk",
        SAVE,
        "shutil.rmtree(folder, ignore_errors=True)",
        "pass",
        f"{SCRIPTS}test_a_full_disk_at_the_last_model_is_one_line_and_leaves_no_half_of_it",
    ),
    (
        "adapters are put on adapters",
        LORA,
        '    if hasattr(module, "peft_config"):\n        raise',
        "    if False:\n        raise",
        f"{SCRIPTS}test_adapters_are_saved_alone_and_trained_further_as_they_are",
    ),
    (
        "a critic is exported with the actor's weights",
        EXPORT,
        '    if cfg.critic:\n        name = "critic"\n    try:\n',
        "    try:\n",
        f"{SCRIPTS}test_the_critic_of_a_run_is_exported",
    ),
    (
        "a sweep finds out at its end that it cannot write",
        SWEEP,
        '    rft.run.check_results(Path(cfg.out) / "sweep.json")\n',
        "",
        f"{SCRIPTS}test_a_sweep_knows_at_once_where_it_cannot_write",
    ),
    (
        "a hub that is not there is asked again and again",
        SOURCES,
        "HF_HUB_OFFLINE = before or bool(why)",
        "HF_HUB_OFFLINE = before",
        "tests/data/test_data_rows.py::test_a_hub_data_set_without_a_hub_is_one_line_within_seconds",
    ),
    (
        "max_bytes is not read",
        "rft_fn/run/saving.py",
        "limit = cfg.max_bytes or None",
        "limit = None",
        f"{SCRIPTS}test_the_checkpoints_that_are_kept",
    ),
    (
        "best is not read",
        "rft_fn/run/saving.py",
        "keep=cfg.keep, best=best,",
        "keep=cfg.keep, best=0,",
        f"{SCRIPTS}test_the_checkpoints_that_are_kept",
    ),
]
