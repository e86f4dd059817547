"""Mutants of attention with sinks, of an engine's states and ways: each is killed by the test beside it."""

_WAYS = "tests/test_engine_ways.py::"
_ATTENTION = "tests/test_attention.py::"

MUTANTS = [
    (
        "sinks are left out of the softmax",
        "rft_fn/model/attention/engines.py",
        "sinks[:, None, None].expand(-1, size, 1)",
        "sinks[:, None, None].expand(-1, size, 1) - 1e9",
        _ATTENTION + "test_sinks_are_in_the_denominator",
    ),
    (
        "a token sees those behind it where there are sinks",
        "rft_fn/model/attention/engines.py",
        "device=q.device).triu(1)",
        "device=q.device).triu(2)",
        _ATTENTION + "test_sinks_are_in_the_denominator",
    ),
    (
        "a layer with sinks gets packs without them",
        "rft_fn/model/attention/interface.py",
        "return packed(q, k, v, packs, scale=scale, sinks=sinks)[None], None",
        "return packed(q, k, v, packs, scale=scale)[None], None",
        "tests/test_probe.py::test_log_probs_and_gradients_are_those_of_each_row_alone[GptOss]",
    ),
    (
        "models without sdpa keep a mask for each pack",
        "rft_fn/model/attention/interface.py",
        "if not inner._supports_sdpa and",
        "if not inner and",
        "tests/test_probe.py::test_log_probs_and_gradients_are_those_of_each_row_alone[GptOss]",
    ),
    (
        "tuples in a state are not looked into",
        "rft_fn/engine/state.py",
        "if isinstance(x, (list, tuple)):",
        "if isinstance(x, list):",
        _WAYS + "test_a_state_in_containers_of_every_kind",
    ),
    (
        "a tensor that stands in two places becomes two",
        "rft_fn/engine/state.py",
        "    seen[id(x)] = (x, new)",
        "    seen[id(new)] = (x, new)",
        _WAYS + "test_a_state_in_containers_of_every_kind",
    ),
    (
        "rows are always the first dimension",
        "rft_fn/engine/state.py",
        "rows[path] = sizes.index((1, 2))",
        "rows[path] = 0",
        _WAYS + "test_a_state_in_containers_of_every_kind",
    ),
    (
        "padding may get into a state",
        "rft_fn/engine/ways.py",
        "            return [even, single]",
        "            return [padded, even, single]",
        _WAYS + "test_what_padding_adds_to_a_state_is_found_in_16_bits",
    ),
    (
        "a state is trusted after one token",
        "rft_fn/engine/ways.py",
        "    return bool((got - want).abs().mean() <= most * spread)",
        "    return bool((got - want)[:, :1].abs().mean() <= most * spread)",
        _WAYS + "test_a_state_that_is_not_the_trainers_is_found[Zamba2]",
    ),
    (
        "the mask of a model without keys covers all tokens",
        "rft_fn/engine/batch.py",
        "mask if self.way.grows else mask[:, -width:]",
        "mask",
        _WAYS + "test_the_fastest_way_that_is_right_is_found[Mamba]",
    ),
    (
        "prompts of all lengths share a batch",
        "rft_fn/engine/hf.py",
        "    if not way.padded:",
        "    if way.rows is None:",
        _WAYS + "test_samples_are_those_of_each_prompt_alone_and_of_the_trainer[xLSTM]",
    ),
    (
        "rows that need to be alone share a batch",
        "rft_fn/engine/hf.py",
        "    if how.way.single:",
        "    if not how:",
        _WAYS + "test_samples_are_those_of_each_prompt_alone_and_of_the_trainer[Rwkv]",
    ),
    (
        "the decoder of Llama 4 is the whole model",
        "rft_fn/model/text.py",
        "return models[0] if len(models) == 1 else whole",
        "return whole",
        "tests/test_probe.py::test_the_head_is_fused_only_where_logits_are_its_output[Llama4Text]",
    ),
    (
        "shared experts are handed to peft",
        "rft_fn/model/targets.py",
        "kept = [path for path in paths if path in (config.target_modules or ())]",
        "kept = list(paths)",
        "tests/test_lora.py::test_names_of_experts_and_routers_are_no_targets[DeepseekV3]",
    ),
    (
        "routers that are linear layers get adapters",
        "rft_fn/model/targets.py",
        'if not type(m).__module__.startswith("transformers.models.")',
        "if True",
        "tests/test_lora.py::test_names_of_experts_and_routers_are_no_targets[Llama4Text]",
    ),
    (
        "what a family makes of random numbers is kept instead of read",
        "rft_fn/model/materialize.py",
        '    skeleton.to("meta")',
        "    del config",
        "tests/test_materialize.py::test_without_memory_first_a_model_is_what_transformers_loads[DiffLlama-dtype0]",
    ),
]
