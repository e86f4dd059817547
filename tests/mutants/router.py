"""Mutants of experts: their balance, adapters beside them, their memory; each is killed by its test."""

_ROUTER = "tests/model/test_router.py::"

MUTANTS = [
    (
        "choices of all sequences of a pack are counted together",
        "rft_fn/model/router.py",
        "aux = n_experts * (share[seq] * p).sum(-1)",
        "aux = n_experts * (share.mean(0) * p).sum(-1)",
        _ROUTER + "test_a_cut_between_sequences_changes_nothing",
    ),
    (
        "padding is counted",
        "rft_fn/model/router.py",
        "    return begins | (pack.pos > 0)",
        "    return begins | (pack.pos >= 0)",
        _ROUTER + "test_a_gradient_is_the_same_however_the_batch_is_cut[Qwen3Moe]",
    ),
    (
        "scores of sigmoid routers are taken for a softmax",
        "rft_fn/model/router.py",
        "            self.ways[name] = way",
        '            self.ways[name] = "softmax"',
        _ROUTER + "test_the_balance_is_that_of_each_row_alone[DeepseekV3]",
    ),
    (
        "routers whose weights are explained by nothing pass",
        "rft_fn/model/router.py",
        "elif errors[way] > MOST_ERROR:",
        "elif errors[way] > 2:",
        _ROUTER + "test_what_has_no_balance_is_refused_by_name",
    ),
    (
        "processes that share a sequence count their own tokens alone",
        "rft_fn/model/router.py",
        "    if sequence is not None:\n        count",
        "    if sequence is not None and num_seqs < 0:\n        count",
        _ROUTER + "test_two_processes_are_as_one",
    ),
    (
        "routers of the last layer alone",
        "rft_fn/model/router.py",
        "return torch.stack(auxes).mean(0), torch.stack(shares).amax(0)",
        "return auxes[-1], torch.stack(shares).amax(0)",
        _ROUTER + "test_the_balance_is_that_of_each_row_alone[Mixtral]",
    ),
    (
        "the balance is not weighed in sft",
        "train_scripts/sft.py",
        "return loss + cfg.router_aux * out.aux, rft.metric.router(out, b)",
        "return loss + out.aux, rft.metric.router(out, b)",
        "tests/scripts/test_straight_line.py::test_sft_of_experts_is_its_definition",
    ),
    (
        "the balance is not weighed in grpo",
        "train_scripts/grpo.py",
        "loss = loss + cfg.router_aux * out.aux",
        "loss = loss + 0 * out.aux",
        _ROUTER + "test_the_coefficient_changes_what_a_script_learns",
    ),
    (
        "the balance is not weighed in ppo",
        "train_scripts/ppo.py",
        "loss = loss + cfg.router_aux * out.aux",
        "loss = loss + 0 * out.aux",
        _ROUTER + "test_the_coefficient_changes_what_a_script_learns",
    ),
    (
        "a layer that its owner reads gets an adapter that nothing runs",
        "rft_fn/model/targets.py",
        "    every = [path for path in every if path not in closed]\n",
        "",
        "tests/model/test_lora.py::test_a_layer_that_is_read_is_no_target",
    ),
    (
        "routed experts are passed over without a word",
        "rft_fn/model/targets.py",
        "            if p.dim() == 3:",
        "            if p.dim() == 4:",
        "tests/model/test_lora.py::test_what_adapters_pass_over_is_said[Qwen3Moe]",
    ),
    (
        "the products of experts take no memory",
        "rft_fn/memory/without_values.py",
        "    return a.new_empty(shape)",
        "    return a.new_empty(1).expand(shape)",
        "tests/memory/test_memory.py::test_families_with_states_and_experts_are_counted[DeepseekV3]",
    ),
]
