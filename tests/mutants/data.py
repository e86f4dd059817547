"""Mutants of the data, of rewards, and of rewards over the ranks."""

JUDGING, REWARDS, ROWS, DATA = (
    f"tests/{x}.py::test_"
    for x in ("collect/test_judging", "reward/test_reward", "data/test_data_rows", "data/test_data")
)

MUTANTS = [
    (
        "judge takes rows in any order",
        "rft_fn/reward/scoring.py",
        "if g != row // sizes[0]:",
        "if g < 0:",
        JUDGING + "two_rollouts_put_together_are_refused",
    ),
    (
        "judge takes groups of different sizes",
        "rft_fn/reward/scoring.py",
        "if size != sizes[0] or not size:",
        "if not size:",
        JUDGING + "a_rollout_whose_rows_are_not_the_prompts_in_order_is_refused",
    ),
    (
        "a part is judged by the rows of the first groups",
        "rft_fn/reward/scoring.py",
        "rows = slice(chosen.start * size, chosen.stop * size)",
        "rows = slice(0, len(chosen) * size)",
        JUDGING + "a_part_is_those_rows_of_the_whole",
    ),
    (
        "each rank keeps what it computed",
        "rft_fn/collect/judging.py",
        '    if strategy.world > 1:\n        with strategy.session.phase("gather of rewards")',
        '    if strategy.world > 9:\n        with strategy.session.phase("gather of rewards")',
        JUDGING + "a_reward_that_differs_by_rank_is_the_same_on_all",
    ),
    (
        "an error of another rank is dropped",
        "rft_fn/collect/judging.py",
        "        if answer.error:",
        '        if answer.error == "none":',
        JUDGING + "what_a_reward_raises_on_one_rank_is_raised_on_all",
    ),
    (
        "ranks may hold different prompts",
        "rft_fn/collect/judging.py",
        "if answer.digest != digest:",
        "if answer.digest != answer.digest:",
        JUDGING + "ranks_with_other_prompts_are_refused",
    ),
    (
        "a reward that swallows its limit may make up a result",
        "rft_fn/engine/time_limit.py",
        "    if clock.interrupted:  # the block has caught even this",
        "    if not clock.line and clock.interrupted:  # the block has caught even this",
        JUDGING + "a_reward_that_hangs_is_interrupted_and_named",
    ),
    (
        "only Exceptions have the note",
        "rft_fn/reward/combine.py",
        "        except BaseException as error:\n            if not isinstance",
        "        except Exception as error:\n            if not isinstance",
        REWARDS + "every_exception_out_of_a_reward_has_the_note",
    ),
    (
        "the last of two weights of a reward wins",
        "rft_fn/reward/loading.py",
        "if text in weights:",
        "if text in ():",
        REWARDS + "a_reward_is_named_once_on_the_command_line",
    ),
    (
        "a path is cut at its first equals sign",
        "rft_fn/reward/spec.py",
        'name, equals, weight = spec.rpartition("=")',
        'name, equals, weight = spec.partition("=")',
        REWARDS + "only_a_number_behind_the_last_equals_sign_is_a_weight",
    ),
    (
        "verifiable rewards do not name their column",
        "rft_fn/reward/verifiable.py",
        "    @reads(column)\n    def reward(",
        "    def reward(",
        REWARDS + "the_columns_that_a_score_reads",
    ),
    (
        "a cursor is ignored",
        "rft_fn/data/drawing.py",
        "    if start is None:\n",
        "    if start is None or start:\n",
        DATA + "a_cursor_draws_each_row_once_whatever_n_is",
    ),
    (
        "an empty answer is an answer",
        "rft_fn/data/prompts.py",
        "if is_empty(value):",
        "if value is None:",
        DATA + "a_row_that_cannot_be_used_is_found_before_training",
    ),
    (
        "the end of a response is not counted",
        "rft_fn/data/prompts.py",
        "add_special_tokens=False)) + 1",
        "add_special_tokens=False))",
        DATA + "a_response_ends_with_a_token_of_its_own",
    ),
    (
        "whatever its size, a row is tokenised",
        "rft_fn/data/prompts.py",
        "if len(text) > self.max_prompt * self.widest:",
        "if len(text) < 0:",
        DATA + "an_enormous_row_is_not_tokenised",
    ),
    (
        "None fills a template",
        "rft_fn/data/text_template.py",
        "        if _is_hole(value):",
        "        if value == ():",
        DATA + "a_template_is_filled_or_refused",
    ),
    (
        "lines are counted from 0",
        "rft_fn/data/file_formats.py",
        "enumerate(file, 1)",
        "enumerate(file, 0)",
        ROWS + "places_are_lines_as_an_editor_counts_them",
    ),
    (
        "a file may change while it is read",
        "rft_fn/data/rows.py",
        "if _stamp(self._file) != self._stamp:",
        "if _stamp(self._file) == ():",
        ROWS + "a_file_that_changes_while_it_is_read_is_an_error",
    ),
    (
        "a byte is counted from the start of its line",
        "rft_fn/data/rows.py",
        "byte {start + error.start} of",
        "byte {error.start} of",
        ROWS + "a_file_that_is_not_utf8_is_named_with_the_byte",
    ),
]
