"""Mutants of ranked lists, points and steps: rows into items, and the script that learns from them."""

SCRIPT = "train_scripts/train_rm.py"
BY_HAND = "tests/data/test_responses.py"
DEFINED = "tests/scripts/test_train_rm.py::test_the_loss_of_"

MUTANTS = [
    (
        "the lowest score of a list is the best",
        "rft_fn/data/lists.py",
        "column, sign = self.scores, -1",
        "column, sign = self.scores, 1",
        f"{BY_HAND}::test_scores_rank_a_list_from_the_highest_down",
    ),
    (
        "a step ends a token early",
        "rft_fn/data/steps.py",
        "ends.append(len(ids) - 1)",
        "ends.append(len(ids) - 2)",
        f"{BY_HAND}::test_steps_by_hand",
    ),
    (
        "the labels of a point are in the order of the row",
        "rft_fn/data/points.py",
        "labels = labels_at(row, self.labels, place",
        "labels = labels_at(row, sorted(self.labels, reverse=True), place",
        f"{BY_HAND}::test_a_point_has_a_label_for_each_head",
    ),
    (
        "two equal responses of a list are let pass",
        "rft_fn/data/lists.py",
        "if len({tuple(lesson.ids) for lesson in found}) < len(found):",
        "if not found:",
        f"{BY_HAND}::test_a_row_that_cannot_be_used_is_named_and_counted",
    ),
    (
        "a row without a margin is an error",
        "rft_fn/data/pairs.py",
        "if self.margin and row.get(self.margin) is not None:",
        "if self.margin:",
        f"{BY_HAND}::test_a_pair_has_a_margin_and_a_preference_of_each_head",
    ),
    (
        "a row of a table without a margin is an error",
        "rft_fn/data/pairs.py",
        "if self.margin and row.get(self.margin) is not None:",
        "if self.margin and self.margin in row:",
        f"{BY_HAND}::test_the_rows_of_every_file_make_the_items_of_rows[pair-parquet]",
    ),
    (
        "a row of a table without ranks is an error",
        "rft_fn/data/lists.py",
        "if self.ranks not in there:",
        "if self.ranks not in row:",
        f"{BY_HAND}::test_the_rows_of_every_file_make_the_items_of_rows[list-hub]",
    ),
    (
        "the rejected side is never the better one",
        SCRIPT,
        "better = torch.where(preference < 0, rejected, chosen)",
        "better = chosen",
        f"{DEFINED}pairs_is_its_definition",
    ),
    (
        "long lists count more",
        SCRIPT,
        "w = rft.weight.unit_sum(exp.mask, unit)",
        "w = rft.weight.token_mean(exp.mask)",
        f"{DEFINED}lists_is_its_definition",
    ),
    (
        "margins of pairs are not in the loss",
        SCRIPT,
        "margin=margin, label_smoothing",
        "label_smoothing",
        f"{DEFINED}pairs_is_its_definition",
    ),
    (
        "the accuracy for a kind of wrong answer is that of all pairs",
        SCRIPT,
        "rft.metric.mean(right, told & of)",
        "rft.metric.mean(right, told)",
        "tests/scripts/test_train_rm.py::test_it_learns_from_the_built_in_pairs",
    ),
]
