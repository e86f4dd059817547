"""Mutants of compiled decoder blocks, of packed attention's boundaries, and of the bench of a GPU."""

BLOCKS, INTERFACE = "rft_fn/model/blocks.py", "rft_fn/model/attention/interface.py"
KEPT = "tests/model/test_blocks.py::test_a_bound_model_keeps_its_attention_between_graphs"

MUTANTS = [
    (
        "compiled blocks have attention inside their graphs",
        BLOCKS,
        "    attention.leave_graphs(root.parts.text)\n",
        "",
        KEPT,
    ),
    (
        "binding a compiled model again puts attention back into its graphs",
        INTERFACE,
        "        return  # its blocks are compiled\n",
        "        pass\n",
        KEPT,
    ),
    (
        "every layer makes the boundaries of a pack anew",
        "rft_fn/model/bounds.py",
        '        if "cu" not in self._made:\n',
        "        if True:\n",
        "tests/model/test_attention.py::test_every_layer_calls_the_kernel_with_the_same_boundaries",
    ),
    (
        "the work of the head counts prompts",
        "tests/bench/gpu_step_model.py",
        "config.vocab_size * int(b.mask.sum())",
        "config.vocab_size * len(b.mask)",
        "tests/test_gpu_step.py::test_the_work_of_a_pack_is_that_of_its_products",
    ),
]
