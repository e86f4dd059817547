"""Mutants of several rewards at once, of those that need all ranks, and of scalar models as rewards."""

SEVERAL, SCALAR, RANKS = (
    f"tests/{x}.py::test_"
    for x in ("reward/test_reward_several", "reward/test_scalar_reward", "collect/test_joint_judging")
)
VETO, READING = "rft_fn/reward/veto.py", "rft_fn/reward/scalar_model.py"

MUTANTS = [
    (
        "a step ends without its separator",
        READING,
        "            steps[-1] += separator\n",
        "            pass\n",
        SCALAR + "steps_are_the_text_and_end_with_what_separates_them",
    ),
    (
        "the probability of a step is that of a calibrated score",
        READING,
        'if self.steps != "product":',
        "if True:",
        SCALAR + "the_reward_of_steps_is_its_definition[product]",
    ),
    (
        "a truncated response has an end as its last step",
        READING,
        "        if not truncated:\n            steps[-1]",
        "        if True:\n            steps[-1]",
        SCALAR + "a_truncated_response_ends_in_the_middle_of_its_step_and_an_empty_one_at_the_prompt",
    ),
    (
        "values of a column are compared as they are",
        "rft_fn/reward/row_weights.py",
        "weight.of.get(str(value), math.nan)",
        "weight.of.get(value, math.nan)",
        SEVERAL + "recipes_of_specs_are_the_same_as_on_the_command_line",
    ),
    (
        "a reward is asked for rows that it does not apply to",
        "rft_fn/reward/combine.py",
        "rows = (~weights[name].isnan()).nonzero().flatten().tolist()",
        "rows = list(range(count))",
        SEVERAL + "each_label_has_its_rewards_and_weights_and_a_shared_one_is_called_once",
    ),
    (
        "two rewards may have one name",
        "rft_fn/reward/by_column.py",
        "if name in components and components[name][0] is not fn:",
        "if name in ():",
        SEVERAL + "a_row_without_a_recipe_and_recipes_that_cannot_be_are_errors",
    ),
    (
        "one value has two weights",
        "rft_fn/reward/row_weights.py",
        "            if value in self.of:",
        "            if value in ():",
        SEVERAL + "specs_for_some_rows_that_cannot_be",
    ),
    (
        "a model is asked for all rows",
        "rft_fn/reward/joint.py",
        "return tuple(applies.nonzero().flatten().tolist())",
        "return tuple(range(len(owners)))",
        SEVERAL + "joint_rewards_are_asked_once_for_their_rows_and_weighted_with_the_others",
    ),
    (
        "a model may give too few values",
        "rft_fn/reward/joint.py",
        "or found.shape != (len(rows),):",
        "or found.dim() != 1:",
        SEVERAL + "a_joint_reward_without_its_values_or_with_too_few_is_an_error",
    ),
    (
        "a remote begins after the models",
        "rft_fn/reward/calling.py",
        "            self._start([call for call in calls if call.waits], found, waiting)\n"
        "            found |= meanwhile()\n",
        "            found |= meanwhile()\n"
        "            self._start([call for call in calls if call.waits], found, waiting)\n",
        SEVERAL + "a_slow_remote_overlaps_joint_and_plain_rewards_whatever_their_order",
    ),
    (
        "what waits for a network outlives an error",
        "rft_fn/reward/calling.py",
        "        except BaseException:\n            self._loop.close()",
        "        except BaseException:",
        SEVERAL + "a_model_that_raises_ends_what_waits_for_a_network",
    ),
    (
        "files are read for every reward",
        "rft_fn/reward/scoring.py",
        'if any(asks_for(fn, "media") for fn, _ in components.values()):',
        "if components:",
        SEVERAL + "files_are_not_read_for_rewards_that_do_not_name_media",
    ),
    (
        "a part of the groups has the keys of the first ones",
        "rft_fn/reward/scoring.py",
        "batch.prompts[i].index, seen[i]",
        "len(keys), seen[i]",
        SEVERAL + "rewards_may_ask_for_prompt_ids_truncation_keys_and_media",
    ),
    (
        "a veto is at the limit too",
        VETO,
        "hit = free & (parts[veto.part] < veto.limit)",
        "hit = free & (parts[veto.part] <= veto.limit)",
        SEVERAL + "a_part_below_its_limit_makes_the_reward_a_constant",
    ),
    (
        "the last veto wins",
        VETO,
        "        free = free & ~hit\n",
        "",
        SEVERAL + "a_part_below_its_limit_makes_the_reward_a_constant",
    ),
    (
        "parts are divided by the population's deviation",
        "rft_fn/reward/normalize.py",
        "(count - 1).clamp(min=1)",
        "count.clamp(min=1)",
        SEVERAL + "standardized_is_its_definition",
    ),
    (
        "normalised parts forget the vetoes",
        "rft_fn/reward/normalize.py",
        "return vetoed(total, judged.parts, score.vetoes)[0].view(n, g)",
        "return total.view(n, g)",
        SEVERAL + "normalised_parts_are_weighted_as_the_definition_and_vetoes_stay",
    ),
    (
        "a truncated response has an end",
        READING,
        "        if not truncated:\n",
        "        if True:\n",
        SCALAR + "another_tokenizer_reads_the_text_with_an_end_unless_it_was_truncated",
    ),
    (
        "text of a response may be a special token",
        READING,
        "add_special_tokens=False, split_special_tokens=True",
        "add_special_tokens=False",
        SCALAR + "another_tokenizer_reads_the_text_with_an_end_unless_it_was_truncated",
    ),
    (
        "ids of any tokenizer are read as they are",
        READING,
        "return a.get_vocab() == b.get_vocab()",
        "return True",
        SCALAR + "tokenizers_of_other_vocabularies_are_told_apart",
    ),
    (
        "scores of the rollout before are kept",
        READING,
        "            self.found = None\n            self.rows",
        "            self.rows",
        SCALAR + "heads_are_calibrated_and_share_one_forward",
    ),
    (
        "a row may be longer than the window",
        READING,
        "len(ids) > self.window:",
        "len(ids) > 2 * self.window:",
        SCALAR + "a_row_beyond_the_window_is_an_error_that_names_it",
    ),
    (
        "a rank that fails leaves the others to compute a model alone",
        "rft_fn/collect/judging.py",
        "        _together(strategy, score, joint.prepare, timeout, digest=digest)\n",
        "        _together(strategy, score, lambda: None, timeout, digest=digest)\n",
        RANKS + "what_one_rank_raises_reaches_all",
    ),
]
