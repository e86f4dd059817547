"""Mutants of the engines on servers."""

HTTP, POOL = "rft_fn/engine/http.py", "rft_fn/engine/pool.py"
SERVERS, DIALECT = "rft_fn/engine/servers.py", "rft_fn/engine/dialect.py"
OPENAI, SGLANG = "rft_fn/engine/openai.py", "rft_fn/engine/sglang.py"
H, E = "tests/engine/test_http.py::test_", "tests/engine/test_http_engine.py::test_"

MUTANTS = [
    (
        "every server gets the key of the policy's servers",
        HTTP,
        'headers["Authorization"] = f"Bearer {os.environ[self.key_env]}"',
        'headers["Authorization"] = f"Bearer {os.environ[KEY]}"',
        E + "other_servers_may_have_a_key_of_their_own",
    ),
    (
        "a deadline is of each read",
        HTTP,
        "        sock.settimeout(_left(end))\n        part",
        "        part",
        H + "a_deadline_is_of_the_whole_answer",
    ),
    (
        "a request that begins after the end is made",
        HTTP,
        "            if broken_off:",
        "            if broken_off and not sock:",
        H + "requests_under_way_can_be_broken_off",
    ),
    (
        "pauses have no jitter",
        POOL,
        "self.jitter.uniform(0.5, 1.0)",
        "1.0",
        H + "pauses_double_have_jitter_and_an_end",
    ),
    (
        "a server that failed is asked again at once",
        POOL,
        "            member.why = str(error)",
        "            member.why = str(error)[:0]",
        H + "jobs_move_away_from_a_server_that_fails",
    ),
    (
        "each waiting thread tries the servers again",
        POOL,
        "if self.rounds != round_ or self.stopped.is_set() or self.working():",
        "if self.working():",
        H + "when_none_works_all_are_tried_again_for_some_rounds",
    ),
    (
        "a sample may end without a stop",
        SERVERS,
        "        if len(reply.tokens) < ask.max_new:",
        "        if len(reply.tokens) < 0:",
        E + "a_fault_in_mid_rollout_changes_no_token",
    ),
    (
        "a server that comes back keeps its weights",
        SERVERS,
        "        if self.folder and known.label != want:",
        "        if not self.folder and known.label != want:",
        E + "a_server_that_comes_back_empty_is_given_the_weights",
    ),
    (
        "versions are not compared",
        DIALECT,
        "    if reply.label is not None and reply.label != label:",
        "    if reply.label is None and reply.label != label:",
        E + "weights_of_another_version_are_not_sampled_from",
    ),
    (
        "NaN is a log-prob",
        DIALECT,
        "math.isfinite(x) and x <= 1e-3",
        "not x > 1e-3",
        E + "a_fault_in_mid_rollout_changes_no_token",
    ),
    (
        "a raw log-prob passes the probe",
        DIALECT,
        "        if min(cut.logp) < -1e-3:",
        "        if min(cut.logp) > 1e-3:",
        E + "an_option_that_is_ignored_is_found_at_the_start",
    ),
    (
        "a tied name is not sent",
        "rft_fn/engine/weight_folder.py",
        "                for alias in aliases.get(name, ()):",
        "                for alias in aliases.get(name, ())[:0]:",
        E + "a_tied_weight_is_sent_by_all_its_names",
    ),
    (
        "a cache may stay full",
        OPENAI,
        '        if answer != {"success": True}:',
        '        if "success" not in answer:',
        E + "a_cache_that_is_not_emptied_fails_the_load",
    ),
    (
        "short tensors are taken",
        OPENAI,
        'if not problem and worker["short"]:',
        'if problem and worker["short"]:',
        E + "a_server_that_did_not_take_all_is_not_used",
    ),
    (
        "SGLang's log-probs before a cut pass for those after it",
        SGLANG,
        "            if cut:",
        "            if cut and not entries:",
        E + "rollouts_are_those_of_the_hf_engine",
    ),
]
