"""Mutants of judges: parsers, quotes, tokens of quoted texts, votes, and when a run stops."""

FORMS, ASKED, ATTACKS = (
    f"tests/reward/{x}.py::test_" for x in ("test_forms", "test_generative", "test_generative_attacks")
)

MUTANTS = [
    (
        "judges on servers wait one after the other",
        "rft_fn/reward/calling.py",
        'return asynchronous or getattr(self.fn, "waits", False) is True',
        "return asynchronous",
        "tests/reward/test_generative.py::"
        "test_judges_on_servers_are_asked_at_the_same_time_and_while_others_compute",
    ),
    (
        "a request that nobody awaits goes on",
        "rft_fn/reward/event_loop.py",
        "        interrupt()\n        raise\n",
        "        raise\n",
        "tests/reward/test_generative.py::"
        "test_a_judge_on_servers_that_nobody_waits_for_is_closed[another part raises]",
    ),
    (
        "the engine of a judge on servers is built by another thread",
        "rft_fn/reward/generative_model.py",
        "        self.engine.wake()  # here",
        "        pass  # here",
        "tests/reward/test_generative.py::"
        "test_a_judge_on_servers_says_what_one_here_says_and_is_made_by_the_calling_thread",
    ),
    (
        "a judge that sees gets the first image alone",
        "rft_fn/reward/generative_model.py",
        'x["url"]) for x in records]',
        'x["url"]) for x in records[:1]]',
        "tests/reward/test_generative.py::"
        "test_a_judge_that_sees_gets_every_image_and_no_place_of_one_by_text",
    ),
    (
        "the first verdict counts, which may be quoted from the response",
        "rft_fn/reward/verdicts.py",
        'behind = said.rpartition(f"<{tag}>")',
        'behind = said.partition(f"<{tag}>")',
        FORMS + "nothing_in_front_of_a_verdict_changes_it",
    ),
    (
        "float reads numbers: nan, 1e9, 1_0 and digits of other scripts",
        "rft_fn/reward/verdicts.py",
        "if _NUMBER.fullmatch(text) is None:",
        'if not text.replace("_", "").isalnum():',
        FORMS + "numbers_are_decimals_in_ascii",
    ),
    (
        "numbers out of range pass",
        "rft_fn/reward/verdicts.py",
        "if x is None or not self.low <= x <= self.high:",
        "if x is None:",
        FORMS + "a_verdict_is_in_range_whatever_is_said",
    ),
    (
        "an object that was begun behind the last whole one is overlooked",
        "rft_fn/reward/verdicts.py",
        "if json.dumps(self.key) in rest:",
        "if json.dumps(self.key) in rest[:0]:",
        FORMS + "verdicts",
    ),
    (
        "thoughts that did not end are searched",
        "rft_fn/reward/verdicts.py",
        'if "<think>" in answer:',
        'if "<think>" in answer[:0]:',
        FORMS + "thoughts_have_no_verdict",
    ),
    (
        "a response may hold tags",
        "rft_fn/reward/quoting.py",
        'return text.replace("&", "&amp;").replace("<", "&lt;")',
        'return text.replace("&", "&amp;")',
        ATTACKS + "a_response_adds_no_special_token_and_no_delimiter",
    ),
    (
        "special tokens typed in a response are special tokens",
        "rft_fn/reward/asking.py",
        "add_special_tokens=False, split_special_tokens=True",
        "add_special_tokens=False, split_special_tokens=False",
        ATTACKS + "special_tokens_are_the_text_that_they_are_written_with",
    ),
    (
        "special tokens of a tokenizer that does not split them stay",
        "rft_fn/reward/asking.py",
        "return [i for i in ids if i not in special]",
        "return list(ids)",
        ATTACKS + "a_tokenizer_that_makes_special_tokens_of_any_text_loses_them",
    ),
    (
        "an answer that was cut off has a verdict",
        "rft_fn/reward/generative_model.py",
        "        if cut:\n            return None\n",
        "",
        ASKED + "an_answer_that_was_cut_off_has_no_verdict",
    ),
    (
        "the one in the place of B wins what A wins",
        "rft_fn/reward/voting.py",
        "won[match.b] += 1 - share",
        "won[match.b] += share",
        ASKED + "shares_are_the_mean_of_what_each_one_won",
    ),
    (
        "both orders of a pair share a key",
        "rft_fn/reward/questions.py",
        'names.append("none")',
        "continue",
        ASKED + "a_pair_against_a_reference_is_asked_in_both_orders_with_keys_of_their_own",
    ),
    (
        "good calls between bad ones do not matter",
        "rft_fn/reward/unparsable.py",
        "        if not bad:\n            self.bad = 0\n            return\n",
        "        if not bad:\n            return\n",
        ASKED + "the_limit_is_a_share_and_calls_in_a_row",
    ),
    (
        "questions that are not asked do not count towards the limit",
        "rft_fn/reward/unparsable.py",
        "bad = len(unread) + too_long",
        "bad = len(unread)",
        ASKED + "the_limit_is_a_share_and_calls_in_a_row",
    ),
]
