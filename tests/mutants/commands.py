"""Mutants of the command `rft`: scripts, completion and the doctor."""

SCRIPTS, COMPLETION = "rft_fn/run/scripts.py", "rft_fn/run/completion.py"
DOCTOR, PACKAGES, MACHINE = (f"rft_fn/run/doctor/{name}.py" for name in ("__init__", "packages", "machine"))
C, D = "tests/run/test_commands.py::test_", "tests/run/test_doctor.py::test_"

MUTANTS = [
    (
        "a copy overwrites what is there",
        SCRIPTS,
        "    if path.exists():\n",
        "    if False:\n",
        C + "mistakes_are_one_line_and_lose_nothing",
    ),
    (
        "a copy may hide a library",
        SCRIPTS,
        "    if hidden := _library(path.stem):",
        "    if hidden := '':",
        C + "mistakes_are_one_line_and_lose_nothing",
    ),
    (
        "a script of one's own does not find what lies beside it",
        SCRIPTS,
        "        sys.path.insert(0, str(path.resolve().parent))",
        "        pass",
        C + "a_script_of_ones_own_is_python",
    ),
    (
        "options of a part are completed by their long names alone",
        COMPLETION,
        "        if f.name in names:",
        "        if f.name == names:",
        "tests/run/test_completion.py::test_every_option_of_a_script_is_offered",
    ),
    (
        "versions are compared as texts",
        PACKAGES,
        "    if numbers(got) < numbers(least):",
        "    if got < least:",
        D + "a_required_package_that_is_old_or_missing_is_wrong",
    ),
    (
        "the hub is asked although it is turned off",
        MACHINE,
        "    if constants.HF_HUB_OFFLINE:",
        "    if False:",
        D + "the_hub_is_not_asked_when_it_is_turned_off",
    ),
    (
        "the hub may take as long as it likes",
        MACHINE,
        "    thread.join(patience)",
        "    thread.join()",
        D + "a_hub_is_asked_at_its_own_address_and_not_for_long",
    ),
    (
        "a bug report has the tokens of its writer",
        DOCTOR,
        '            value = "set"',
        "            pass",
        D + "nothing_secret_is_shown",
    ),
]
