"""Mutants of rewards over HTTP: deadlines, sizes, counts, redirects, retries, and what a server refuses."""

CLIENT, FORM, SERVER = (
    f"tests/{x}.py::test_" for x in ("reward/test_remote", "reward/test_remote_protocol", "run/test_serving")
)
ENDS = CLIENT + "what_no_try_would_mend_ends_the_call_at_once_in_one_line"

MUTANTS = [
    (
        "a call has no deadline",
        "rft_fn/reward/remote/client.py",
        "asyncio.timeout(self.limits.deadline)",
        "asyncio.timeout(None)",
        CLIENT + "the_deadline_is_that_of_the_whole_call",
    ),
    (
        "an attempt has no limit",
        "rft_fn/reward/remote/client.py",
        "asyncio.timeout(self.limits.attempt)",
        "asyncio.timeout(None)",
        CLIENT + "an_attempt_is_limited_from_its_first_byte_to_its_last",
    ),
    (
        "an answer may have any size",
        "rft_fn/reward/remote/connection.py",
        "if size > max_bytes:",
        "if size > max_bytes << 20:",
        ENDS + "[without end]",
    ),
    (
        "an answer's length is not looked at before it is read",
        "rft_fn/reward/remote/connection.py",
        "int(declared) > max_bytes",
        "int(declared) < 0",
        ENDS + "[10 GB]",
    ),
    (
        "redirects are followed",
        "rft_fn/reward/remote/connection.py",
        "follow_redirects=False",
        "follow_redirects=True",
        CLIENT + "a_redirect_is_refused_and_the_other_address_never_asked",
    ),
    (
        "rewards may be too few",
        "rft_fn/reward/remote/values.py",
        "if len(values) != count:",
        "if len(values) > count:",
        ENDS + "[too few]",
    ),
    (
        "rewards may be beyond float32",
        "rft_fn/reward/remote/values.py",
        "return abs(x) <= torch.finfo(torch.float32).max",
        "return x == x",
        ENDS + "[beyond float32]",
    ),
    (
        "an error repeats the token",
        "rft_fn/reward/remote/client.py",
        'text = text.replace(token, "***")',
        "text = text.strip()",
        CLIENT + "the_token_is_sent_and_never_shown",
    ),
    (
        "a busy server is not asked again",
        "rft_fn/reward/remote/client.py",
        "AGAIN = (408, 425, 429)",
        "AGAIN = (408, 425)",
        CLIENT + "what_may_pass_is_tried_again",
    ),
    (
        "Retry-After is not kept",
        "rft_fn/reward/remote/client.py",
        "wait = max(wait, trouble.wait)",
        "wait = min(wait, trouble.wait)",
        CLIENT + "retry_after_is_kept_and_uses_up_no_try",
    ),
    (
        "a server that says when to come again uses up tries",
        "rft_fn/reward/remote/client.py",
        "tries += trouble.wait is None",
        "tries += 1",
        CLIENT + "retry_after_is_kept_and_uses_up_no_try",
    ),
    (
        "requests that fail together count one by one",
        "rft_fn/reward/remote/hosts.py",
        "if began < self.awake_at:",
        "if began < 0:",
        FORM + "failures_of_requests_that_were_under_way_together_count_once",
    ),
    (
        "one host of several is asked alone",
        "rft_fn/reward/remote/hosts.py",
        "return self.failures, self.busy, self.asked",
        "return self.failures, 0, 0",
        CLIENT + "the_load_is_shared",
    ),
    (
        "the groups of prompts are cut apart",
        "rft_fn/reward/remote/served.py",
        "groups[i] == groups[i - 1]",
        "groups[i] is None",
        CLIENT + "many_completions_are_asked_for_in_parts_that_keep_groups_whole",
    ),
    (
        "a deadline may be beyond the time of rewards",
        "rft_fn/collect/judging.py",
        "if deadline >= timeout:",
        "if deadline < 0:",
        CLIENT + "a_deadline_beyond_the_time_of_rewards_is_refused_before_anything_is_asked",
    ),
    (
        "a server's queue has no limit",
        "rft_fn/run/serving/jobs.py",
        "self._rows() + job.rows > self.limit",
        "self._rows() + job.rows < 0",
        SERVER + "a_full_queue_answers_429_and_the_client_comes_again",
    ),
    (
        "a server takes any token",
        "rft_fn/run/serving/app.py",
        "if rules.token and not hmac.compare_digest(",
        "if rules.token and not given and not hmac.compare_digest(",
        SERVER + "the_token_is_asked_of_every_request_for_rewards",
    ),
    (
        "a reward that takes any keyword is taken for one that does not read the step",
        "rft_fn/reward/convention.py",
        'return takes_all(fn) or asks_for(fn, "trainer_state")',
        'return asks_for(fn, "trainer_state")',
        SERVER + "which_rewards_may_read_the_step_of_a_run",
    ),
    (
        "requests of different steps are scored in one call",
        "rft_fn/run/serving/jobs.py",
        "            state = self.batch.state\n",
        "            pass\n",
        SERVER + "requests_of_other_columns_forms_and_steps_are_not_joined",
    ),
    (
        "a request that fails takes those with it that were scored beside it",
        "rft_fn/run/serving/scoring.py",
        "score_jobs(score, [job], timeout)",
        "job.future.set_exception(error)",
        SERVER + "a_request_that_fails_fails_alone",
    ),
]
