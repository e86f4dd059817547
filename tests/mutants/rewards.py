"""Mutants of rewards as users bring them: their form, their arguments, what they return, where they lie."""

BROUGHT, LOADING, JUDGING = (
    f"tests/{x}.py::test_"
    for x in ("reward/test_reward_conventions", "reward/test_reward_loading", "collect/test_judging")
)

MUTANTS = [
    (
        "the responses to messages are texts",
        "rft_fn/reward/scoring.py",
        'answered.append(as_messages(text, "assistant"))',
        "answered.append(text)",
        BROUGHT + "a_prompt_of_messages_has_completions_of_messages",
    ),
    (
        "the ids of a response are those of prompt and response",
        "rft_fn/reward/scoring.py",
        "ids = rollout.tokens[list(rows)][mask].tolist()",
        "ids = rollout.tokens[list(rows)].flatten().tolist()",
        BROUGHT + "a_reward_gets_the_ids_of_the_response_and_the_state_of_the_run",
    ),
    (
        "None is 0 in silence, also where every reward says it",
        "rft_fn/reward/combine.py",
        ".isnan().all(0).nonzero()",
        ".isinf().all(0).nonzero()",
        BROUGHT + "a_row_to_which_nothing_applies_is_an_error_that_names_it",
    ),
    (
        "the mean of a reward counts what it does not apply to",
        "rft_fn/reward/scoring.py",
        "] = x.double().nanmean().item()",
        "] = x.double().nan_to_num().mean().item()",
        BROUGHT + "none_is_left_out_of_the_sum_and_counted",
    ),
    (
        "async rewards run one after the other",
        "rft_fn/reward/calling.py",
        "waiting[call.name] = self._loop.start(_awaited(call.name, result))",
        "found[call.name] = self._loop.start(_awaited(call.name, result)).result()",
        BROUGHT + "async_rewards_run_together_beside_plain_ones",
    ),
    (
        "each batch has an event loop of its own",
        "rft_fn/reward/event_loop.py",
        "if self._thread is None:",
        "if True:",
        BROUGHT + "every_batch_has_the_same_event_loop",
    ),
    (
        "a metric that only one rank has is 0 on the others",
        "rft_fn/reward/scoring.py",
        "torch.full_like(x.reward, math.nan)",
        "torch.full_like(x.reward, 0)",
        JUDGING + "nones_metrics_and_texts_are_the_same_on_every_rank",
    ),
    (
        "a path wins over a column whose name has dots",
        "rft_fn/data/column_path.py",
        "    if path in row:\n",
        '    if path in row and "." not in path:\n',
        BROUGHT + "the_value_at_a_path",
    ),
    (
        "the argument of a factory may be any expression",
        "rft_fn/reward/spec.py",
        "named[keyword.arg] = ast.literal_eval(keyword.value)",
        "named[keyword.arg] = eval(ast.unparse(keyword.value))",
        LOADING + "what_cannot_be_a_reward_is_said",
    ),
    (
        "two packages of one name are one",
        "rft_fn/reward/importing.py",
        "{rng.fold_in(0, str(path), source.hex())}",
        "{rng.fold_in(0, source.hex())}",
        LOADING + "a_file_with_relative_imports_is_a_member_of_its_package",
    ),
    (
        "the second of two rewards of one name takes the place of the first",
        "rft_fn/reward/spec.py",
        "        while chosen in found:",
        "        while chosen in ():",
        LOADING + "two_rewards_of_one_name_are_told_apart",
    ),
    (
        "the preflight shows texts, whatever the data has",
        "rft_fn/reward/preflight.py",
        "asked = list(row.messages)",
        "asked = row.text",
        BROUGHT + "the_preflight_follows_the_data",
    ),
    (
        "a rubric forgets its weights",
        "rft_fn/reward/adapters/verifiers.py",
        "total[i] += function.weight * score",
        "total[i] += score",
        BROUGHT + "a_rubric_is_the_weighted_sum_of_its_functions",
    ),
]
