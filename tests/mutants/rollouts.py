"""Groups that differ in size, rows that are judged, and data of rows that become packs."""

BY_GROUP, SCORING = "rft_fn/advantage/by_group.py", "rft_fn/reward/scoring.py"
BATCH, PACKS = "rft_fn/types/batch.py", "rft_fn/packing/packs.py"
ALONE = "tests/test_by_group.py::test_rows_have_the_advantages_of_their_group_alone"
ON_TOKENS = "a_number_per_response_is_on_each_of_its_tokens_and_words_move_with_them"

MUTANTS = [
    ("a group's deviation divides by its rows", BY_GROUP,
     "others = (_size(index, reward) - 1).clamp(min=1)", "others = _size(index, reward)",
     f"{ALONE}[grpo]"),
    ("the numbers of groups are taken for places", BY_GROUP,
     "    return torch.unique(group, return_inverse=True)[1]", "    return group - group.min()",
     f"{ALONE}[rloo]"),
    ("a group without variance has what its mean rounds away", BY_GROUP,
     "return torch.where(equal, 0, reward - mean)", "return reward - mean",
     "tests/test_by_group.py::test_a_group_without_variance_gets_exactly_zero"),
    ("all rewards of GDPO share their groups", BY_GROUP,
     'own = rearrange(start, "k -> k 1") + index', 'own = rearrange(0 * start, "k -> k 1") + index',
     "tests/test_by_group.py::test_gdpo_normalises_each_reward_in_its_own_groups"),
    ("pass@k of a group of fewer than k responses divides by 0", "rft_fn/advantage/groups.py",
     "(size.unsqueeze(-1) - i).clamp(min=1)", "(size.unsqueeze(-1) - i)",
     "tests/test_by_group.py::test_pass_at_k_is_zero_in_a_group_that_has_no_k_responses"),
    ("columns that no prompt of the judged rows has are left out", SCORING,
     "for name in _keys([p.columns for p in prompts]):",
     "for name in _keys([prompts[i].columns for i in owners]):",
     "tests/test_rollout.py::test_take_commutes_with_judging"),
    ("a row of group -1 is judged by the last prompt", SCORING,
     "if not 0 <= g < len(prompts):", "if g >= len(prompts):",
     "tests/test_rollout.py::test_rows_are_judged_by_the_prompts_that_are_there"),
    ("extra data of responses stays as it is", BATCH,
     "extra = {name: _on_tokens(x, size) for name, x in extra.items()}", "extra = dict(extra)",
     f"tests/test_packing.py::test_{ON_TOKENS}"),
    ("words are not packed", PACKS,
     '"ret", "words")', '"ret")',
     f"tests/test_packing.py::test_{ON_TOKENS}"),
    ("media of packs are those of the first rows", PACKS,
     'found["media"] = exp.media.take(rows)', 'found["media"] = exp.media.take(range(len(rows)))',
     "tests/test_rollout.py::test_take_commutes_with_packs_and_what_is_learned_from_them"),
    ("updates of a partition come in the order of its parts", "rft_fn/optim/combined.py",
     "return in_order, PartitionState(inner=inner)", "return updates, PartitionState(inner=inner)",
     "tests/test_optim.py::test_a_partition_is_each_transform_on_its_own_parameters"),
]  # fmt: skip
