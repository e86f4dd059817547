"""Mutants of what a model that sees or hears gets of a pack: each is killed by the test beside it."""

_MEDIA = "tests/model/test_media.py::"

MUTANTS = [
    (
        "images have the positions of text",
        "rft_fn/model/media.py",
        'inputs["position_ids"] = torch.cat([pack.pos[None], axes])[:, None]',
        'inputs["position_ids"] = pack.pos[None]',
        _MEDIA + "test_gradients_are_those_of_each_sequence_alone[Qwen2VL]",
    ),
    (
        "placeholders are not counted",
        "rft_fn/model/media.py",
        "    if not blind:\n        _check_counts(",
        "    if blind:\n        _check_counts(",
        _MEDIA + "test_placeholders_that_are_not_those_of_the_media",
    ),
    (
        "what the policy sampled is read as the start of media",
        "rft_fn/model/media.py",
        "    return torch.where(sampled, 0, ids)",
        "    return ids",
        _MEDIA + "test_what_the_policy_sampled_is_text[Qwen2.5Omni]",
    ),
    (
        "a model that sees is not asked with placeholders",
        "rft_fn/model/reader.py",
        "places = sorted(placeholders(config))[:1]",
        "places = sorted(placeholders(config))[:0]",
        _MEDIA + "test_a_model_that_mixes_sequences_where_placeholders_stand_gets_one_at_a_time",
    ),
    (
        "of two counts of features the larger is right",
        "rft_fn/model/features.py",
        "usual = min(ratio for ratio, times",
        "usual = max(ratio for ratio, times",
        _MEDIA + "test_placeholders_that_are_not_those_of_the_media",
    ),
    (
        "padding belongs to the prompt",
        "rft_fn/model/media.py",
        "_padded(torch.cat(behind), pack, value=1)[None]",
        "_padded(torch.cat(behind), pack, value=0)[None]",
        _MEDIA + "test_padding_and_an_empty_pack_change_nothing[PaliGemma]",
    ),
]
