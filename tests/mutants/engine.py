"""Mutants of engines, of weight sync and of dynamic sampling."""

ARRIVAL, LIFETIME = "rft_fn/engine/arrival.py", "rft_fn/engine/lifetime.py"
SYNC, GROUPS = "rft_fn/sync/push.py", "rft_fn/collect/dynamic_sampling.py"
MISMATCH, M = "rft_fn/collect/mismatch.py", "tests/collect/test_mismatch.py::test_"
A, L = "tests/engine/test_arrival.py::test_", "tests/engine/test_lifetime.py::test_"
S, G = "tests/test_sync.py::test_", "tests/collect/test_dynamic_sampling.py::test_"

SAMPLER = "tests/engine/test_media_sampler.py::test_"
ROLLOUTS = "tests/collect/test_media_rollouts.py::test_"

MUTANTS = [
    (
        "a token behind an image is at its number",
        "rft_fn/engine/hf/media.py",
        "more[1:] = after - seen.sum(-1)",
        "more[1:] = 0 * after",
        SAMPLER + "log_probs_are_the_trainers",
    ),
    (
        "a placeholder may be sampled in the middle of a response",
        "rft_fn/engine/requests.py",
        "return places.union(",
        "return frozenset(",
        SAMPLER + "a_sampled_placeholder_ends_a_response",
    ),
    (
        "scores read the last token of a row",
        "rft_fn/engine/hf/engine.py",
        "read = (rollout.length - 1).clamp(min=1)",
        "read = rollout.length",
        SAMPLER + "a_sampled_placeholder_ends_a_response",
    ),
    (
        "a partial response is continued without its image",
        "rft_fn/collect/partial.py",
        "        if has_media(prompt):",
        "        if has_media(prompt) and not rows:",
        ROLLOUTS + "partial_rollouts_keep_their_media",
    ),
    (
        "media are sent with each row",
        "rft_fn/engine/prompt_media.py",
        "if id(own) not in copies:",
        "if own is not None:",
        ROLLOUTS + "media_are_sent_once",
    ),
    (
        "a checkpoint of rollouts ahead holds media",
        "rft_fn/collect/ahead.py",
        '"rollout": without_media(done[name])',
        '"rollout": done[name]',
        ROLLOUTS + "a_checkpoint_of_rollouts_ahead_brings_their_media_back",
    ),
    (
        "a weight may stay out of a load",
        ARRIVAL,
        "        if missing:",
        "        if len(missing) > len(self.expected.required):",
        A + "a_weight_that_does_not_arrive_is_named",
    ),
    (
        "a tied weight has to arrive by its first name",
        ARRIVAL,
        "if not tied & present]",
        "if name not in present]",
        A + "a_tied_weight_may_arrive_by_either_name",
    ),
    (
        "buffers are unknown",
        ARRIVAL,
        "    shape = {name: x.shape for name, x in module.named_buffers()}",
        "    shape: dict[str, torch.Size] = {}",
        A + "a_whole_state_dict_may_arrive_buffers_too",
    ),
    (
        "frozen weights have to arrive",
        ARRIVAL,
        "        present = self.names | self.frozen",
        "        present = self.names",
        A + "weights_that_nothing_trains_need_not_arrive",
    ),
    (
        "the weight under an adapter counts as frozen",
        "rft_fn/model/lora.py",
        "name in self.params or name in merged_here or",
        "name in self.params or",
        A + "adapters_arrive_as_the_weights_of_their_layers",
    ),
    (
        "a failure is forgotten",
        LIFETIME,
        '            self.ended = f"failed in {name} ({reason})"',
        "            self.last = engine.status()",
        L + "a_failed_generate_is_the_last_one",
    ),
    (
        "half a load may be sampled from",
        LIFETIME,
        '        with self.fatal("load") as engine:\n            return',
        "        for engine in (self.running(),):\n            return",
        L + "half_a_load_is_never_sampled_from",
    ),
    (
        "a refused request is fatal",
        LIFETIME,
        "        except BadRequest:",
        "        except KeyboardInterrupt:",
        L + "a_refused_request_leaves_the_engine_alive",
    ),
    (
        "a closed engine keeps its weights",
        LIFETIME,
        "        self.engine = None\n",
        "        self.old = engine\n",
        L + "a_closed_engine_says_so_and_holds_no_weights",
    ),
    (
        "what an engine took is not compared with what was sent",
        SYNC,
        "    if delivered.tensors != sent or delivered.bytes != shipment.bytes:",
        "    if delivered.tensors > sent:",
        S + "an_engine_that_took_less_than_was_sent_is_refused",
    ),
    (
        "a count hides what is frozen",
        SYNC,
        'frozenset(getattr(weights, "frozen", ()))',
        "frozenset()",
        S + "what_is_frozen_is_known_to_the_engine",
    ),
    (
        "groups without variance come first",
        GROUPS,
        "if differs[g]] + [",
        "if not differs[g]] + [",
        G + "at_the_bound_the_first_of_the_flat_groups_fill_the_batch",
    ),
    (
        "rows of a chosen group are those of its neighbours",
        GROUPS,
        '"(n g) -> n g", g=size)',
        '"(g n) -> n g", g=size)',
        G + "groups_are_taken_in_the_order_in_which_they_were_drawn",
    ),
    (
        "a tensor that is not sent is not missed",
        SYNC,
        "        if left_out:",
        "        if len(left_out) > 99:",
        S + "the_manifest_names_what_is_wrong_with_a_tensor",
    ),
    (
        "a tensor may be narrower than the trainer's",
        "rft_fn/sync/manifest.py",
        "torch.promote_types(want.dtype, x.dtype) != x.dtype:",
        "x.dtype == torch.bool:",
        S + "the_manifest_names_what_is_wrong_with_a_tensor",
    ),
    (
        "the canary has the same noise each time",
        "rft_fn/sync/canary.py",
        "        key = secrets.randbits(48)",
        "        key = 5",
        S + "noise_is_new_in_every_canary_unless_a_key_is_given",
    ),
    (
        "the canary looks at the true weights alone",
        "rft_fn/sync/canary.py",
        "    if noisy <= limit and floor <= limit:",
        "    if floor <= limit:",
        S + "the_canary_names_a_tensor_that_an_engine_did_not_take",
    ),
    (
        "tensors of a bucket begin where the last one ended",
        "rft_fn/engine/transport/bucket.py",
        "        start += _aligned(size)",
        "        start += size",
        "tests/engine/test_transport.py::test_buckets_hold_every_tensor_bit_by_bit",
    ),
    (
        "icepop has no lower bound",
        MISMATCH,
        "low=1 / cap, high=cap",
        "low=0.0, high=cap",
        M + "a_correction_is_a_factor_of_any_weight",
    ),
    (
        "the larger of the two limits counts",
        MISMATCH,
        "    return min(max_gap, factor * floor)",
        "    return max(max_gap, factor * floor)",
        M + "the_limit_is_a_multiple_of_the_noise_floor",
    ),
]
