"""Mutants of generation from where a row is: limits, starts, keys, stop texts, and shares of ranks."""

REQUESTS, SAMPLER = "rft_fn/engine/requests.py", "rft_fn/engine/hf/sampler.py"
STOP, GATHER = "rft_fn/engine/stop.py", "rft_fn/collect/generate.py"
C, G = "tests/engine/test_continue.py::test_", "tests/collect/test_generate.py::test_"
LAW = C + "the_law_holds_however_rows_are_batched[Llama]"

MUTANTS = [
    (
        "a stream begins anew in each piece",
        SAMPLER,
        "u[r, : row.max_new] = stream[row.start :]",
        "u[r, : row.max_new] = stream[: row.max_new]",
        LAW,
    ),
    (
        "a start is one draw late",
        SAMPLER,
        "u[r, : row.max_new] = stream[row.start :]",
        "u[r, : row.max_new] = stream.roll(-1 if row.start else 0)[row.start :]",
        C + "a_row_draws_from_its_start_in_its_stream",
    ),
    (
        "stop texts are looked for in the new tokens only",
        SAMPLER,
        "max(len(prompt) - row.start, 0) :]",
        "len(prompt) :]",
        C + "a_stop_text_may_begin_before_the_cut",
    ),
    (
        "a stop text may begin in the prompt of a fresh row",
        SAMPLER,
        "max(len(prompt) - row.start, 0) :]",
        "0:]",
        C + "a_stop_text_may_begin_before_the_cut",
    ),
    (
        "tokens before a response count as its own",
        SAMPLER,
        "return _Growing(before, len(before), len(before) + row.max_new, [])",
        "return _Growing(before, len(before), row.max_new, [])",
        G + "rows_that_were_cut_and_continued_are_the_uncut_ones",
    ),
    (
        "the samples of a prompt share one limit",
        SAMPLER,
        "for b, row in enumerate(wanted)],",
        "for b, row in enumerate([wanted[b // n * n] for b in range(len(wanted))])],",
        C + "a_row_ends_at_its_own_limit",
    ),
    (
        "a text that stands in the prompt ends the response",
        STOP,
        "elif self._holds_text(tokens):",
        "elif not tokens:",
        C + "a_text_that_stands_before_a_response_does_not_end_it",
    ),
    (
        "the number of the first sample is ignored",
        REQUESTS,
        "return rng.fold_in(key, first + sample)",
        "return rng.fold_in(key, sample)",
        C + "a_pair_in_place_of_a_key_numbers_the_samples",
    ),
    (
        "the window is checked with the common limit",
        REQUESTS,
        "longest = [max(index(x) for x in max_new[i * n : i * n + n]) for i in range(len(prompts))]",
        "longest = [sampling.max_new] * len(prompts)",
        C + "the_row_with_the_smaller_limit_fits",
    ),
    (
        "the window is checked with the first limit of a prompt",
        REQUESTS,
        "longest = [max(index(x) for x in max_new[i * n : i * n + n]) for i in range(len(prompts))]",
        "longest = [index(max_new[i * n]) for i in range(len(prompts))]",
        C + "a_bad_request_names_what_is_wrong_and_loses_nothing",
    ),
    (
        "a limit of a row may be above the common one",
        REQUESTS,
        "max_new, count * n, 1, sampling.max_new)",
        "max_new, count * n, 1)",
        C + "a_bad_request_names_what_is_wrong_and_loses_nothing",
    ),
    (
        "every rank has the limits of the first rows",
        GATHER,
        "x[rows] for name",
        "x[: rows.stop - rows.start] for name",
        G + "two_ranks_have_what_one_process_has",
    ),
    (
        "a bad prompt has its number on the rank",
        GATHER,
        "refused = error.moved(mine.start)",
        "refused = error.moved(0)",
        G + "a_bad_prompt_has_its_number_of_the_global_batch",
    ),
    (
        "a text is encoded without the chat template",
        REQUESTS,
        "return render(tokenizer, prompt)",
        "return list(tokenizer.encode(prompt))",
        C + "prompts_are_ids_or_prompts_or_text",
    ),
]
