"""Mutants of tokens that begin alike and are computed once."""

FIND, TEXT, BATCHES = "rft_fn/model/prefixes.py", "rft_fn/model/text.py", "rft_fn/packing/batches.py"
ATTENTION, READER, PROBE = (f"rft_fn/model/{x}.py" for x in ("attention/interface", "reader", "probe"))
BOUNDS, KERNELS = "rft_fn/model/bounds.py", "rft_fn/model/attention/kernels.py"
T = "tests/model/test_prefixes.py::test_"

MUTANTS = [
    (
        "padding goes on with its sequence",
        FIND,
        "rows.append(ids[start : start + _leading(counted)])",
        "rows.append(ids[start : start + size])",
        T + "padding_behind_a_sequence_is_no_continuation_of_it",
    ),
    (
        "sequences are compared in the order of the pack",
        FIND,
        "order = sorted(range(len(rows)), key=lambda k: rows[k].tobytes())",
        "order = list(range(len(rows)))",
        T + "tokens_share_a_state_exactly_where_they_begin_alike",
    ),
    (
        "equal tokens behind different ones are shared",
        FIND,
        "size = _leading(rows[before][:size] == rows[k][:size])",
        "size = int((rows[before][:size] == rows[k][:size]).sum())",
        T + "tokens_share_a_state_exactly_where_they_begin_alike",
    ),
    (
        "positions are those of the first tokens of the pack",
        TEXT,
        "pos = pos[bounds.prefixes.kept]",
        "pos = pos[: len(tokens)]",
        T + "log_probs_and_gradients_are_those_of_each_row_alone[Llama]",
    ),
    (
        "the keys of a prompt are those of one response alone",
        BOUNDS,
        "tails.append(Tail(queries.to(self.device), of[keys.to(self.device)], mask))",
        "tails.append(Tail(queries.to(self.device), keys.to(self.device) % len(of.unique()), mask))",
        T + "kept_tokens_attend_as_all_tokens_do",
    ),
    (
        "a kept token sees those behind it",
        BOUNDS,
        "device=self.device).tril(size - count)",
        "device=self.device)",
        T + "kept_tokens_attend_as_all_tokens_do",
    ),
    (
        "kept tokens stay in the order of lengths",
        KERNELS,
        "return take_rows(torch.cat(out), bounds.untangled)",
        "return torch.cat(out)",
        T + "kept_tokens_attend_as_all_tokens_do",
    ),
    (
        "with sinks a kept token sees those behind it",
        KERNELS,
        ".triu(1 + size - count)",
        ".triu(1)",
        T + "kept_tokens_attend_as_all_tokens_do",
    ),
    (
        "gradients of rows are added as threads come along",
        FIND,
        "return embedding(index, x.flatten(1)).unflatten(-1, x.shape[1:])",
        "return x[index]",
        T + "gradients_of_rows_are_the_same_bits_on_several_threads",
    ),
    (
        "a kernel of whole sequences returns all tokens",
        KERNELS,
        "bounds, scale=scale), shared.kept)",
        "bounds, scale=scale), shared.of)",
        T + "a_kernel_of_whole_sequences_gets_them",
    ),
    (
        "a layer that needs all tokens gets some",
        ATTENTION,
        "bounds.refused = why",
        "pass",
        T + "a_layer_that_asks_for_more_after_the_question_is_named",
    ),
    (
        "windows are not looked for",
        ATTENTION,
        'return set(kinds) != {"full_attention"}',
        "return False",
        T + "windows_are_known_by_the_config",
    ),
    (
        "the answer of a model is not heard",
        READER,
        "root.shared = root.shared and agree(found.shares())",
        "agree(found.shares())",
        T + "a_model_whose_states_differ_when_tokens_are_shared_gets_them_all",
    ),
    (
        "models that see share tokens",
        READER,
        "if sees_or_hears(root.parts.decoder) or root.parts.sequence is not None:",
        "if root.parts.sequence is not None:",
        T + "models_that_see_get_all_tokens",
    ),
    (
        "models whose logits are whole are said to share",
        PROBE,
        "if head and not plain:",
        "if head and plain is None:",
        T + "models_that_need_all_tokens_get_them[Granite-changes5]",
    ),
    (
        "the balance of experts is that of shared tokens",
        "rft_fn/model/scorer.py",
        "scorer.shared = share_prefixes and scorer.fused and not aux",
        "scorer.shared = share_prefixes and scorer.fused",
        T + "the_balance_of_experts_counts_every_token",
    ),
    (
        "packs of a prompt may be any number",
        BATCHES,
        "if len(found) <= MORE * len(packs):",
        "if True:",
        T + "rows_of_a_prompt_share_packs_and_no_limit_is_broken",
    ),
    (
        "rows without a prompt are one family",
        BATCHES,
        "prompt = row[:size].numpy().tobytes() or i",
        "prompt = row[:size].numpy().tobytes()",
        T + "rows_without_a_prompt_are_packed_as_ever",
    ),
    (
        "a strategy cuts batches as if nothing were shared",
        "rft_fn/strategy/common.py",
        'self.shared |= getattr(root, "shared", False)',
        "pass",
        T + "a_strategy_keeps_prompts_together_for_a_model_that_shares",
    ),
]
