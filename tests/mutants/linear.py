"""Mutants of linear layers by oneDNN."""

KERNEL, LAYER = "kernels/rft_kernels/linear.py", "rft_fn/model/linear.py"
K, M = "tests/kernel/test_linear.py::test_", "tests/model/test_fast_linear.py::test_"

MUTANTS = [
    (
        "a Zen 4 multiplies gradients of weights by oneDNN",
        KERNEL,
        " and products.wins(a)",
        "",
        K + "the_gradient_of_a_weight_is_torchs_on_a_zen4",
    ),
    (
        "a Zen 4 multiplies the head's gradients of weights by oneDNN",
        "kernels/rft_kernels/products.py",
        "multiplications >= _LARGE and wins(a)",
        "multiplications >= _LARGE",
        "tests/kernel/test_products.py::test_a_factor_that_is_read_by_columns_is_torchs_on_a_zen4",
    ),
    (
        "the gradient of a weight has no derivative",
        KERNEL,
        "grad_b = _Product.apply(grad.T, a.T)",
        "grad_b = _Product.apply(grad.T, a.detach().T)",
        K + "second_derivatives_by_autograd_are_those_of_float64",
    ),
    (
        "the direction of the weight has no part in forward mode",
        KERNEL,
        "parts.append(_Product.apply(a, along_b))",
        "parts.append(_Product.apply(a, 0 * along_b))",
        K + "transforms_of_torch_func_agree_with_float64[forward]",
    ),
    (
        "a batch of weights comes out behind its columns",
        KERNEL,
        "b.flatten(0, 1)).unflatten(1, b.shape[:2]), 1",
        "b.flatten(0, 1)).unflatten(1, b.shape[:2]), 2",
        K + "each_factor_may_vary_under_vmap[dims1]",
    ),
    (
        "the input is kept under a frozen weight",
        KERNEL,
        "        if of_b:\n            kept[0] = a\n",
        "        kept[0] = a\n",
        K + "a_frozen_factor_costs_neither_a_product_nor_what_that_would_keep[weight]",
    ),
    (
        "autocast is not heard",
        KERNEL,
        'return not torch.is_autocast_enabled("cpu")',
        "return True",
        K + "what_is_small_or_of_another_kind_is_torchs",
    ),
    (
        "a packed weight has no bias",
        KERNEL,
        "x.shape[:-1], len(self.weight))\n        if bias is None:\n",
        "x.shape[:-1], len(self.weight))\n        if bias is None or True:\n",
        K + "a_packed_weight_changes_no_bit[True]",
    ),
    (
        "one row by a packed weight is not filled up to four",
        KERNEL,
        "        if count >= _ROWS:\n",
        "        if count >= _ROWS or count == 1:\n",
        K + "rows_by_a_packed_weight_have_the_same_bits_in_any_company",
    ),
    (
        "a small weight is packed too",
        KERNEL,
        "self.weight.numel() >= products.packs_from() and",
        "",
        K + "what_is_small_or_of_another_kind_is_torchs",
    ),
    (
        "packs outlive their rollout, and with it the weights that they were made of",
        LAYER,
        "        for layer in layers:\n            layer.pack = None\n",
        "        pass\n",
        M + "packs_end_with_their_context_and_are_not_copied",
    ),
    (
        "an engine samples from the weights that it packed first",
        LAYER,
        "    for layer in layers:\n        layer.pack = Packed(layer.weight)\n    try:\n        yield\n"
        "    finally:\n        for layer in layers:\n            layer.pack = None\n",
        "    for layer in layers:\n        layer.pack = layer.pack or Packed(layer.weight)\n    yield\n",
        M + "samples_after_a_load_are_those_of_a_new_engine",
    ),
    (
        "an option that is off leaves the layers as an earlier binding made them",
        LAYER,
        "    if on and products.packs_from() < math.inf:",
        "    if not on:\n        return\n    if products.packs_from() < math.inf:",
        M + "the_option_chooses_and_is_read_again_at_each_binding",
    ),
    (
        "a pickle needs this library",
        LAYER,
        "return make, (nn.Linear, *rest), own, *more",
        "return make, (FastLinear, *rest), own, *more",
        M + "copies_and_pickles_are_torchs_layers_and_names_stay",
    ),
    (
        "the engine never packs",
        "rft_fn/engine/hf/engine.py",
        "        with packed(self.lm):\n            responses",
        "        if True:\n            responses",
        M + "samples_after_a_load_are_those_of_a_new_engine",
    ),
    (
        "the forecast of memory leaves out packs",
        "rft_fn/memory/engines.py",
        "    return weights_of(module, kind) + packs + cache",
        "    return weights_of(module, kind) + cache",
        "tests/memory/test_memory.py::test_packs_of_the_engine_are_a_second_copy_of_its_linear_weights",
    ),
    (
        "neighbours of one length are moved for attention",
        "rft_fn/model/bounds.py",
        " and len(by_length) < len(self.runs)",
        "",
        "tests/model/test_attention.py::"
        "test_sequences_of_one_length_are_one_call_and_neighbours_are_not_moved[sizes0-False]",
    ),
    (
        "the updates of adamw are a second tree",
        "rft_fn/optim/adam.py",
        "return updates, tree.replace(state, count=count)",
        "return tree.map(torch.clone, updates), tree.replace(state, count=count)",
        "tests/test_optim.py::test_the_updates_of_adamw_lie_where_the_gradients_did",
    ),
]
