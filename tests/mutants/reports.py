"""Mutants of what is recorded of single tokens, of the page of a run, and of its symptoms."""

GRADIENT, TOKENS, PIECES = "rft_fn/loss/gradient.py", "rft_fn/run/tokens.py", "rft_fn/run/pieces.py"
SERIES, BUILD, SYMPTOMS = (
    "rft_fn/run/page/series.py",
    "rft_fn/run/page/build.py",
    "rft_fn/run/symptoms.py",
)
G, T = "tests/loss/test_token_gradient.py::test_", "tests/run/test_tokens.py::test_"
R, S = "tests/run/test_run_page.py::test_", "tests/run/test_symptoms.py::test_"

MUTANTS = [
    (
        "the gradient of a token leaves out its weight",
        GRADIENT,
        "total = (b.w * loss).sum()",
        "total = loss.sum()",
        G + "of_ppo_clip_it_is_the_derivative_by_hand",
    ),
    (
        "a token without weight counts as clipped",
        GRADIENT,
        "return (gradient == 0) & (adv != 0) & (w != 0)",
        "return (gradient == 0) & (adv != 0)",
        G + "tokens_without_advantage_or_weight_are_not_clipped",
    ),
    (
        "clipped tokens are those before the updates",
        TOKENS,
        "after = effects(self.loss_fn, few, last.logp, first.entropy, unit=self.unit)",
        "after = effects(self.loss_fn, few, first.logp, first.entropy, unit=self.unit)",
        T + "each_number_is_what_its_definition_says",
    ),
    (
        "the mismatch is that after the updates",
        TOKENS,
        "torch.where(few.mask, first.logp - rollout.logp[index], 0)",
        "torch.where(few.mask, last.logp - rollout.logp[index], 0)",
        T + "each_number_is_what_its_definition_says",
    ),
    (
        "an unfinished character is shown as a piece",
        PIECES,
        "if end < len(ids) and text.endswith(_UNFINISHED):",
        "if end < 0 and text.endswith(_UNFINISHED):",
        T + "pieces_of_bytes_are_whole_characters_that_join_to_the_text",
    ),
    (
        "a thinned curve loses its least values",
        SERIES,
        "kept += sorted({min(part, key=y.__getitem__), max(part, key=y.__getitem__)})",
        "kept += sorted({part[0], max(part, key=y.__getitem__)})",
        R + "thinning_keeps_the_extremes_the_order_and_the_limit",
    ),
    (
        "a response can end the element that holds it",
        BUILD,
        '.replace("<", "\\\\u003c")',
        "",
        R + "the_page_is_one_file_that_asks_for_nothing",
    ),
    (
        "a symptom needs no whole window",
        SYMPTOMS,
        "if len(numbers) < WINDOW:",
        "if not numbers:",
        S + "a_window_has_to_be_whole",
    ),
    (
        "growing responses are a symptom although they are rewarded",
        SYMPTOMS,
        "if rewarded or not after > LENGTH_GROWTH * before:",
        "if not after > LENGTH_GROWTH * before:",
        S + "each_rule_is_provoked_alone_and_not_just_below_its_limit",
    ),
]
