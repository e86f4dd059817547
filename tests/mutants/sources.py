"""Mutants of sources and their shares, of held-out rows, and of the names that options have elsewhere."""

SOURCES, FILES = "rft_fn/data/sources.py", "rft_fn/data/file_formats.py"
LOADING, MIXTURE, DRAWING = "rft_fn/data/loading.py", "rft_fn/data/mixture.py", "rft_fn/data/drawing.py"
ELSEWHERE = "rft_fn/run/elsewhere/__init__.py"
S, M = "tests/data/test_sources.py::test_", "tests/data/test_mixture.py::test_"
SCRIPT, NAMES = "tests/scripts/test_script_data.py::test_", "tests/run/test_elsewhere.py::test_"

C = "tests/data/test_curriculum.py::test_"

MUTANTS = [
    (
        "files of a pattern come in any order",
        SOURCES,
        "found = sorted(glob.glob(str(path), recursive=True))",
        "found = sorted(glob.glob(str(path), recursive=True), reverse=True)",
        S + "files_of_a_pattern_in_order",
    ),
    (
        "a row of several files is named by the first",
        "rft_fn/data/rows.py",
        "        rows, at = self._find(i)\n        return rows.place(at)",
        "        rows, at = self._find(i)\n        return self._parts[0].place(at)",
        S + "a_row_of_a_pattern_is_named_by_its_own_file",
    ),
    (
        "options of a config are ignored",
        SOURCES,
        "if paths and ours and config == usual:",
        "if paths and ours:",
        S + "options_of_a_config_are_the_librarys",
    ),
    (
        "a split that is trained on is evaluated on",
        SOURCES,
        "if name in found and name != taken:",
        "if name in found:",
        S + "rows_are_held_out_where_there_is_no_test_split[only a test split]",
    ),
    (
        "a conversation is a table of rows",
        FILES,
        'return "role" not in x[0] and "from" not in x[0]',
        "return True",
        S + "a_json_object_that_wraps_its_rows",
    ),
    (
        "held-out rows are trained on too",
        LOADING,
        "trained = kind.from_rows(Part(rows, kept, name),",
        "trained = kind.from_rows(rows,",
        S + "rows_are_held_out_where_there_is_no_test_split",
    ),
    (
        "an evaluation on training rows is not said",
        LOADING,
        'if x.identity("test") in taken:',
        'if x.identity("test") in ():',
        S + "an_evaluation_on_training_rows_is_said",
    ),
    (
        "the source furthest behind may wait",
        MIXTURE,
        "k = min(ready, key=lambda k: -(-(drawn[k] + 1) * period // weights[k]))",
        "k = ready[0]",
        M + "the_share_of_every_source_holds_at_every_place",
    ),
    (
        "a source begins anew in every period",
        MIXTURE,
        "return k, turn * self.weights[k] + self._before[at]",
        "return k, self._before[at]",
        M + "each_source_is_passed_over_in_an_order_of_its_own",
    ),
    (
        "all sources have one order",
        DRAWING,
        'rng.fold_in(seed, "source", k)',
        "seed",
        M + "two_sources_of_one_size_have_different_orders",
    ),
    (
        "a mixture is evaluated on the rows of its first places alone",
        MIXTURE,
        "            if size is None or j < size:\n",
        "            if size is None or j < size or j % size:\n",
        M + "an_evaluation_takes_every_row_of_a_mixture_once",
    ),
    (
        "epochs are rounded down",
        LOADING,
        "return math.ceil(Fraction(str(epochs)) * dataset.size / batch)",
        "return max(int(Fraction(str(epochs)) * dataset.size / batch), 1)",
        M + "steps_of_epochs",
    ),
    (
        "a run may go on with other epochs though its schedule has an end",
        "rft_fn/run/setup.py",
        "    return ()\n",
        "    return names\n",
        SCRIPT + "where_the_schedule_has_an_end_epochs_are_part_of_the_run",
    ),
    (
        "an answer leads to a flag that the script lacks",
        ELSEWHERE,
        "if to.option in own and meant:",
        "if meant:",
        NAMES + "no_answer_leads_to_a_flag_that_is_not_there",
    ),
    (
        "an option means the same in all scripts",
        ELSEWHERE,
        "meant = not to.needs or to.needs in own",
        "meant = True",
        NAMES + "an_option_of_another_library_is_answered_in_one_line",
    ),
    (
        "a source that is solved leaves the curriculum",
        "rft_fn/data/curriculum.py",
        ".clamp(min=floor)",
        ".clamp(min=1e-9)",
        C + "what_is_learned_changes_the_draw_and_the_floor_keeps_all",
    ),
    (
        "the prompts of a step count as one",
        "rft_fn/data/curriculum.py",
        "(1 - 1 / window) ** len(mine)",
        "(1 - 1 / window)",
        C + "a_step_with_equal_means_is_as_many_single_updates",
    ),
    (
        "a source begins again in each step",
        "rft_fn/data/curriculum.py",
        "start = int(state.drawn[k])",
        "start = 0",
        C + "a_source_hands_out_its_rows_in_passes_and_samples_each_anew",
    ),
    (
        "shares forget what a source is owed",
        "rft_fn/data/curriculum.py",
        "owed = (state.owed + n * shares",
        "owed = (n * shares",
        C + "each_source_has_its_share_of_any_number_of_prompts",
    ),
]
