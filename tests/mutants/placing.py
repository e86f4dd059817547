"""Mutants of models that share the device, each with the test that kills it."""

PLACING, RUN, PHASES = "rft_fn/model/placing.py", "rft_fn/run/placing.py", "rft_fn/memory/phases.py"
PLACE, SHARED = "tests/strategy/test_place.py", "tests/run/test_placing.py"
FORECAST = "tests/memory/test_phases.py"

MUTANTS = [
    (
        "only trained parameters leave the device",
        PLACING,
        "        self.root._apply(copy)\n",
        "        for p in self.root.parameters():\n"
        "            if p.requires_grad:\n"
        "                p.data = copy(p.data)\n",
        f"{PLACE}::test_every_byte_of_a_model_leaves_the_device_and_comes_back",
    ),
    (
        "a model half of which is back counts as on the device",
        PLACING,
        "            if self.mover is not None:\n"
        "                self.apply(self.mover.to_device)\n"
        "            self.on_host = False\n",
        "            self.on_host = False\n"
        "            if self.mover is not None:\n"
        "                self.apply(self.mover.to_device)\n",
        f"{PLACE}::test_a_move_that_fails_is_completed_by_the_next",
    ),
    (
        "a model on the host can be called",
        "rft_fn/model/bind.py",
        '        self.residence.require_device("apply")\n',
        "",
        f"{PLACE}::test_a_model_on_the_host_refuses_and_says_what_to_call",
    ),
    (
        "a model on the host can be updated",
        "rft_fn/strategy/common.py",
        "        require_device(state)\n        source = ",
        "        source = ",
        f"{PLACE}::test_a_model_on_the_host_refuses_and_says_what_to_call",
    ),
    (
        "a copy of a state is where the first one is",
        "rft_fn/strategy/local.py",
        "tree.replace(state, residence=None)",
        "state",
        f"{PLACE}::test_a_copy_of_a_state_does_not_wait_for_the_first",
    ),
    (
        "weights on a CPU are copied",
        PLACING,
        '    if device.type == "cpu":\n',
        '    if device.type == "none":\n',
        f"{PLACE}::test_on_a_cpu_nothing_is_copied",
    ),
    (
        "an engine that dies gets no weights that are away",
        "rft_fn/run/engine.py",
        "        with with_weights(state):\n",
        "        if True:\n",
        f"{SHARED}::test_an_engine_that_dies_gets_weights_that_are_away",
    ),
    (
        "a block leaves its models on the device where it fails",
        RUN,
        "    finally:\n        for apply in applies:\n",
        "    except ZeroDivisionError:\n        for apply in applies:\n",
        f"{SHARED}::test_a_block_has_its_models_and_leaves_none",
    ),
    (
        "frozen models stay in all phases",
        PHASES,
        '            there |= {"trained", "frozen", "rewards"}\n        if self.awake:',
        '            there |= {"trained", "rewards"}\n        there |= {"frozen"}\n        if self.awake:',
        f"{FORECAST}::test_a_phase_holds_the_models_that_it_uses_and_no_others",
    ),
    (
        "a weight sync has an engine's cache",
        PHASES,
        '            sizes["engine"] = self.delivered\n',
        "            pass\n",
        f"{FORECAST}::test_the_table_has_a_line_for_each_phase",
    ),
]
