"""Mutants of the windows of rows, of engines and processors with media, and the tests that kill them."""

_RUNS, _WINDOW = "tests/scripts/test_media_runs.py::", "tests/data/test_window.py::"
_PROCESSORS = "tests/model/test_processors.py::"

MUTANTS = [
    (
        "servers of tokens take media",
        "rft_fn/engine/__init__.py",
        "EngineType(openai.build, openai.check_config, check_media=refuse_media)",
        "EngineType(openai.build, openai.check_config)",
        _RUNS + "test_servers_that_take_tokens_alone_are_refused_before_anything_is_loaded",
    ),
    (
        "an engine is not asked whether it takes the media of the data",
        "rft_fn/run/task.py",
        "    if any(prompt.media_names for prompt in prompts):\n",
        "    if False:\n",
        _RUNS + "test_servers_that_take_tokens_alone_are_refused_before_anything_is_loaded",
    ),
    (
        "evaluate.py does not ask whether the engine takes the media",
        "train_scripts/evaluate.py",
        "    rft.run.check_engine_media(st, model, dataset)\n",
        "",
        _RUNS + "test_servers_that_take_tokens_alone_are_refused_before_anything_is_loaded",
    ),
    (
        "multi_turn.py does not ask whether the engine takes the media",
        "train_scripts/multi_turn.py",
        "        rft.run.check_engine_media(st, cfg.model, found[0])\n",
        "",
        _RUNS + "test_servers_that_take_tokens_alone_are_refused_before_anything_is_loaded",
    ),
    (
        "a side of a pair with an image may be empty",
        "rft_fn/data/pairs.py",
        '        _refuse_empty(place, {"chosen response": chosen, "rejected response": rejected})\n',
        "",
        _WINDOW + "test_a_pair_with_an_image_has_two_responses_and_a_template",
    ),
    (
        "a pair has the length of its better side",
        "rft_fn/data/pairs.py",
        '        check_window(place, longest, 0, self.window, limit="max_length")\n',
        '        check_window(place, len(chosen.ids), 0, self.window, limit="max_length")\n',
        _WINDOW + "test_a_row_fits_to_the_last_token",
    ),
    (
        "a conversation has the length of what stands before its first learned token",
        "rft_fn/data/prompts.py",
        "        longest = max([len(ids), *(len(lesson.ids) for lesson in learned)])\n",
        "        longest = len(ids)\n",
        _WINDOW + "test_a_row_fits_to_the_last_token",
    ),
    (
        "dpo.py does not ask for the model's window",
        "train_scripts/dpo.py",
        '    how["window"] = rft.model.read_window(cfg.model)\n',
        "",
        _WINDOW + "test_scripts_refuse_a_row_above_the_window_before_a_model_is_loaded",
    ),
    (
        "audio in chunks may not be longer than one",
        "rft_fn/data/processing.py",
        '        if getattr(self.processor, "in_chunks", False):\n            return\n',
        "",
        _PROCESSORS + "test_voxtral_hears_audio_longer_than_a_chunk",
    ),
    (
        "the chunks of an audio are its bands",
        "rft_fn/model/chunks.py",
        "made.reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(0, 1)",
        "made.reshape(-1, extractor.feature_size, extractor.nb_max_frames)",
        _PROCESSORS + "test_voxtral_hears_audio_longer_than_a_chunk",
    ),
    (
        "an image of SmolVLM has the tokens of Idefics3",
        "rft_fn/model/processor.py",
        '        how["image_seq_len"] = found["image_seq_len"]\n',
        "        pass\n",
        _PROCESSORS + "test_smolvlm_is_read_without_torchvision_and_num2words",
    ),
]
