"""Mutants of environments, tools and conversations."""

TURNS, RENDERING, TOOLS, GAMES = (
    f"tests/{x}.py::test_"
    for x in (
        "collect/test_turns", "environment/test_rendering", "environment/test_tools",
        "environment/test_games",
    )
)  # fmt: skip

MUTANTS = [
    (
        "all samples of a prompt draw alike",
        "rft_fn/collect/turns.py",
        "rng.fold_in(row.key, row.sample, row.seat, row.turns)",
        "rng.fold_in(row.key, row.seat, row.turns)",
        TURNS + "turns_and_samples_have_draws_of_their_own",
    ),
    (
        "observations are in the mask",
        "rft_fn/collect/conversations.py",
        "self.mask += [False] * len(ids)",
        "self.mask += [True] * len(ids)",
        TURNS + "conversations_are_those_sampled_one_at_a_time",
    ),
    (
        "the reward of a turn is on its first token",
        "rft_fn/collect/conversations.py",
        "self.rewards.append((self.last_token, reward))",
        "self.rewards.append((self.spoke_at, reward))",
        TURNS + "conversations_are_those_sampled_one_at_a_time",
    ),
    (
        "a turn more than the limit",
        "rft_fn/collect/turns.py",
        "if row.turns == limits.turns:",
        "if row.turns > limits.turns:",
        TURNS + "conversations_are_those_sampled_one_at_a_time",
    ),
    (
        "rewards may be NaN",
        "rft_fn/collect/acting.py",
        " or not math.isfinite(x)",
        "",
        TURNS + "a_bad_environment_is_named_with_its_row_and_turn",
    ),
    (
        "the end of a turn is written twice",
        "rft_fn/environment/rendering.py",
        "text = text.removeprefix(last)",
        "text = text",
        RENDERING + "the_end_of_a_turn_is_written_once_and_added_where_it_is_missing",
    ),
    (
        "a template may leave messages out",
        "rft_fn/environment/rendering.py",
        'if message["content"].strip() not in text:',
        'if message["content"].strip() not in text + message["content"]:',
        RENDERING + "a_template_that_cannot_continue_a_conversation_is_refused",
    ),
    (
        "a tool that never ends is left to run",
        "rft_fn/environment/tools.py",
        "            work.interrupt()\n",
        "",
        TOOLS + "a_tool_that_never_ends_takes_no_more_time",
    ),
    (
        "the output of a tool has no limit",
        "rft_fn/environment/tools.py",
        "if len(text) > max_output:",
        "if len(text) > max_output * 1000:",
        TOOLS + "whatever_a_tool_does_is_text_for_the_model",
    ),
    (
        "the lower card wins",
        "rft_fn/environment/kuhn_poker.py",
        "winner = int(CARDS.index(self.cards[1]) > CARDS.index(self.cards[0]))",
        "winner = int(CARDS.index(self.cards[1]) < CARDS.index(self.cards[0]))",
        GAMES + "best_play_pays_the_nash_value",
    ),
    (
        "the best response of the second seat loses",
        "rft_fn/environment/kuhn_poker.py",
        "found.append(-expected_payoff(opponent, pure))",
        "found.append(expected_payoff(opponent, pure))",
        GAMES + "exploitability_of_plays_whose_value_is_known",
    ),
    (
        "the best response never bets",
        "rft_fn/environment/kuhn_poker.py",
        "product((0.0, 1.0), repeat",
        "product((0.0, 0.0), repeat",
        GAMES + "nobody_wins_more_than_the_best_response",
    ),
    (
        "a bet is read as a pass",
        "rft_fn/environment/kuhn_poker.py",
        'found[card, "1"] = [*second, *renderer.reply(second, as_messages("bet,your:"))]',
        'found[card, "1"] = [*second, *renderer.reply(second, as_messages("pass,your:"))]',
        GAMES + "the_situations_are_what_a_policy_reads",
    ),
    (
        "an answer needs no calculator",
        "rft_fn/environment/calculator.py",
        "if stepped.done and not state.outputs:",
        "if stepped.done and len(state.outputs) > 9:",
        GAMES + "the_rewards_of_the_calculator",
    ),
]
