"""Mutants of rollouts that are sampled ahead or cut, and of engines in a process of their own."""

AHEAD, PARTIAL = "rft_fn/collect/ahead.py", "rft_fn/collect/partial.py"
ORDER, LOCATE = "rft_fn/collect/in_order.py", "rft_fn/sync/locate.py"
DEADLINE = "tests/engine/test_engine_deadline.py::test_"
NAMED = "tests/test_sync.py::test_the_canary_names_a_"
TOGETHER = "tests/collect/test_refused.py::test_ranks_refuse_the_same_prompt_and_share_the_rewards_of_rows"
START = "tests/engine/test_http_start.py::test_"
PROCESS, CHILD = "rft_fn/engine/process.py", "rft_fn/engine/child.py"
A, C = "tests/collect/test_ahead.py::test_", "tests/collect/test_partial.py::test_"
P = "tests/engine/test_process.py::test_"

MUTANTS = [
    (
        "sampling is one step less ahead",
        AHEAD,
        "min(step + ahead + 1, total)",
        "min(step + max(ahead, 1), total)",
        A + "a_rollout_is_due_when_the_weights_of_its_version_are_there",
    ),
    (
        "weights that wait for the engine are the trainer's own",
        ORDER,
        'x.detach().to("cpu", copy=True)',
        "x.detach().cpu()",
        A + "each_rollout_is_of_the_version_that_the_schedule_says",
    ),
    (
        "an engine that was built again has no weights",
        ORDER,
        "            if self.loaded is not None:\n",
        "            if self.loaded is not None and self.rebuilds > 9:\n",
        A + "an_engine_that_dies_is_built_again_with_the_weights_it_had",
    ),
    (
        "an engine may take less than it was sent",
        ORDER,
        "            if delivered._replace(seconds=0.0) != copy.delivered:",
        "            if delivered.version != copy.version:",
        A + "an_engine_that_takes_too_little_is_not_sampled_from",
    ),
    (
        "rollouts that nobody asks for stay in checkpoints",
        AHEAD,
        "kept = self._asked & set(self._done)",
        "kept = set(self._done)",
        A + "what_a_run_no_longer_asks_for_leaves_its_checkpoints",
    ),
    (
        "an engine ahead takes all threads",
        AHEAD,
        "config.threads or max(1, threads // 2)",
        "config.threads or threads",
        A + "an_engine_of_its_own_process_never_sleeps_and_has_half_of_the_threads",
    ),
    (
        "a response is continued in the stream of another sample",
        PARTIAL,
        "(keys[b // n], b % n)",
        "(keys[b // n], 0)",
        C + "with_one_version_cut_and_continued_equals_uncut",
    ),
    (
        "a group is learned from when its first response is finished",
        PARTIAL,
        "~_open(groups, sampling).view(-1, n).any(-1)",
        "~_open(groups, sampling).view(-1, n)[:, 0]",
        C + "with_one_version_cut_and_continued_equals_uncut",
    ),
    (
        "a step may have nothing to learn from",
        PARTIAL,
        "    while not bool(_finished(groups, n, sampling).any()):",
        "    while not len(groups.born):",
        C + "a_step_has_something_to_learn_from",
    ),
    (
        "an engine outlives its trainer",
        CHILD,
        "    while os.getppid() == parent:",
        "    while parent:",
        P + "no_process_is_left_however_the_script_ends[kill]",
    ),
    (
        "an engine believes that it is a rank",
        PROCESS,
        "if name not in _TORCHRUN and not name",
        "if not name",
        P + "its_threads_and_environment",
    ),
    (
        "an engine that failed keeps its process",
        PROCESS,
        "        if self.ended:\n            return\n        self.ended",
        "        if why:\n            self.ended = why\n            return\n        self.ended",
        P + "a_failure_ends_it_in_one_line[raises]",
    ),
    (
        "an engine that was built again samples unchecked",
        ORDER,
        "            self.unchecked = True\n",
        "",
        A + "an_engine_that_was_built_again_is_checked_before_its_rollouts_are_used",
    ),
    (
        "an engine that fails its check is sampled from",
        ORDER,
        "self.failed = EngineDead(str(error))",
        "self.failed = None",
        A + "an_engine_that_fails_its_check_is_not_sampled_from",
    ),
    (
        "a lost rollout is drawn with newer weights",
        AHEAD,
        "            older.load(calls.engine())\n",
        "            pass\n",
        A + "what_is_lost_with_an_engine_is_drawn_again_with_the_weights_it_had",
    ),
    (
        "what a step has used is lost with its engine",
        AHEAD,
        "            done |= self._used\n",
        "            pass\n",
        A + "what_is_lost_with_an_engine_is_drawn_again_with_the_weights_it_had",
    ),
    (
        "the canary names the tensor before the one",
        LOCATE,
        "return names[bad - 1]",
        "return names[bad - 2]",
        NAMED + "tensor_that_an_engine_did_not_take",
    ),
    (
        "the canary has no weights for layers in each other's places",
        LOCATE,
        "(unchanged, noise, initial, uniform)",
        "(unchanged, noise, initial)",
        NAMED + "layer_that_is_in_the_place_of_another",
    ),
    (
        "the canary does not know the first weights",
        LOCATE,
        "(unchanged, noise, initial, uniform)",
        "(unchanged, noise, uniform)",
        NAMED + "tensor_that_an_engine_did_not_take",
    ),
    (
        "a call of an engine has no limit",
        "rft_fn/engine/deadline.py",
        "engine._replace(generate=generate, score=score)",
        "engine._replace(score=score)",
        DEADLINE + "a_call_that_hangs_in_python_is_interrupted_and_leaves_a_dead_engine",
    ),
    (
        "frozen weights do not reach the servers",
        "rft_fn/engine/arrival.py",
        "if tied & self.frozen and not tied & self.names",
        "if tied & self.frozen and tied & self.names",
        START + "what_is_frozen_reaches_the_servers_too",
    ),
    (
        "frozen weights are written with every load",
        "rft_fn/engine/weight_folder.py",
        "if problem or self._link(names, before):",
        "if problem:",
        START + "what_is_frozen_is_written_once[True]",
    ),
    (
        "a disk without links loses what is frozen",
        "rft_fn/engine/weight_folder.py",
        "                path.unlink()\n            return False\n",
        "                path.unlink()\n            return True\n",
        START + "what_is_frozen_is_written_once[False]",
    ),
    (
        "servers of other runs are never compared",
        "rft_fn/engine/servers.py",
        "            if self.mixed:",
        "            if False:",
        START + "servers_with_weights_of_other_runs_are_compared_after_the_first_load",
    ),
    (
        "servers may hold different models",
        "rft_fn/engine/server_checks.py",
        "        if not gap <= DIFFERENT:",
        "        if gap < 0:",
        START + "servers_of_two_models_are_refused_in_a_line",
    ),
    (
        "only the rank of a bad prompt refuses it",
        "rft_fn/collect/generate.py",
        "            everyone = dist.all_gather_object(refused)\n",
        "            pass\n",
        TOGETHER,
    ),
    (
        "every rank asks for the rewards of all rows",
        "rft_fn/collect/judging.py",
        "            mine = parts[strategy.rank]",
        "            mine = range(len(owners))",
        TOGETHER,
    ),
]
