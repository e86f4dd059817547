"""Mutants of preference pairs: rows into pairs, their weights and sums, and the script."""

DPO = "train_scripts/dpo.py"
SETUP = "rft_fn/run/setup.py"
PAIRS, WRONG = "rft_fn/data/pairs.py", "rft_fn/data/wrong_answers.py"
LINE = "tests/scripts/test_straight_line.py::test_dpo_is_its_definition"
PLACES = "tests/data/test_pairs.py::test_a_row_that_cannot_be_used_is_named_by_its_place"

MUTANTS = [
    (
        "the reference is the current policy",
        SETUP,
        "return model.score(frozen, frozen_params, packs)",
        "return model.score(apply, params, packs)",
        LINE,
    ),
    (
        "the reference of adapters has them on",
        SETUP,
        "partial(model.score, model.without_adapters(module, apply))",
        "partial(model.score, apply)",
        "tests/scripts/test_dpo.py::test_the_reference_of_adapters_is_the_model_without_them",
    ),
    (
        "the mean is over tokens, so that long pairs count more",
        DPO,
        "w=rft.weight.pair_mean(exp.mask)",
        "w=rft.weight.token_mean(exp.mask)",
        LINE,
    ),
    (
        "the chosen side's log-prob is not divided by its tokens",
        DPO,
        "sides[0] / tokens.clamp(min=1)",
        "sides[0]",
        LINE,
    ),
    (
        "the evaluation's pairs are those of the training",
        "rft_fn/data/loading.py",
        "_task(x.source, tokenizer, seed + 1, kind, options)",
        "_task(x.source, tokenizer, seed, kind, options)",
        LINE,
    ),
    (
        "ipo takes its own beta",
        DPO,
        '"ipo": partial(rft.loss.ipo, beta=cfg.beta)',
        '"ipo": rft.loss.ipo',
        LINE,
    ),
    (
        "the two sides of a pair are its neighbours'",
        "rft_fn/packing/packs.py",
        "    return first, second",
        "    return first, second.roll(1)",
        "tests/test_packing.py::test_the_two_sides_of_pairs",
    ),
    (
        "pairs without a token are in the mean",
        "rft_fn/weight.py",
        "return m, tokens[of, None], (tokens > 0).sum().clamp(min=1)",
        "return m, tokens[of, None], tokens.new_tensor(len(tokens))",
        "tests/test_weight.py::test_a_mean_over_pairs",
    ),
    (
        "equal rewards agree with a preference",
        "rft_fn/metric.py",
        "(better > worse)",
        "(better >= worse)",
        "tests/test_metric.py::test_what_one_reads_of_pairs",
    ),
    (
        "a pair may be larger than a pack by a token",
        PAIRS,
        "inputs = len(chosen.ids) + len(rejected.ids) - 2",
        "inputs = len(chosen.ids) + len(rejected.ids) - 3",
        PLACES,
    ),
    (
        "whole texts are cut within a word",
        PAIRS,
        'prompt = re.sub(r"\\s*\\S*$", "", chosen[:same])',
        "prompt = chosen[:same]",
        "tests/data/test_pairs.py::test_whole_texts_share_their_prompt",
    ),
    (
        "the prompt of two conversations loses its last turn",
        PAIRS,
        "return opened(chosen[:same], self.system), chosen[same:], rejected[same:]",
        "return opened(chosen[: same - 1], self.system), chosen[same:], rejected[same:]",
        "tests/data/test_pairs.py::test_the_forms_of_messages_are_one",
    ),
    (
        "a wrong answer may be right",
        WRONG,
        "if text and task.verify(text, row) < 1:",
        "if text:",
        "tests/data/test_pairs.py::test_the_pairs_of_a_task",
    ),
    (
        "all rejected answers are guesses",
        WRONG,
        "at = random_.random() * sum(mixture.values())",
        "at = 0.0 * sum(mixture.values())",
        "tests/data/test_pairs.py::test_mistakes_are_of_every_kind",
    ),
]
