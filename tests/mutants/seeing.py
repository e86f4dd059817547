"""Mutants of models that see or hear: loading, frozen parts, and the forecast of their memory."""

FREEZE, MODALITY, LOADED = "rft_fn/model/freeze.py", "rft_fn/modality.py", "rft_fn/model/pretrained.py"
VALUES, ESTIMATE = "rft_fn/memory/without_values.py", "rft_fn/memory/estimate.py"

MUTANTS = [
    (
        "a config with towers gives the text model alone",
        LOADED,
        "    factory = getattr(transformers, modality.auto_class(config))\n",
        "    factory = transformers.AutoModelForCausalLM\n",
        "tests/model/test_actors.py::test_a_config_with_towers_gives_the_whole_model",
    ),
    (
        "a model that hears is looked up in one table only",
        MODALITY,
        '        tables["AutoModelForSeq2SeqLM"] = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING\n',
        "        pass\n",
        "tests/test_modality.py::test_a_model_with_towers_is_made_by_a_class_that_takes_media",
    ),
    (
        "a loaded model trains what its class keeps fixed",
        LOADED,
        "    _keep_frozen(module)\n",
        "",
        "tests/model/test_freeze.py::test_weights_that_the_class_keeps_fixed_are_fixed_either_way",
    ),
    (
        "a pattern that matches nothing is passed over",
        FREEZE,
        "    if not found:\n        near",
        "    if False:\n        near",
        "tests/model/test_freeze.py::test_a_pattern_has_to_match_and_to_leave_something",
    ),
    (
        "a tied tensor is frozen by its first name alone",
        FREEZE,
        "module.named_parameters(remove_duplicate=False)",
        "module.named_parameters()",
        "tests/model/test_freeze.py::test_a_tied_tensor_is_frozen_by_either_name",
    ),
    (
        "a tower that a config leaves out is a modality",
        MODALITY,
        'if getattr(config, "audio_config", config) is None:',
        "if config is None:",
        "tests/test_modality.py::test_a_tower_that_a_config_leaves_out_is_none",
    ),
    (
        "a saved model forgets the files of its processor",
        "rft_fn/model/save.py",
        "            shutil.copyfile(source, folder / name)",
        "            pass",
        "tests/model/test_actors.py::test_a_saved_model_keeps_the_files_of_its_processor",
    ),
    (
        "a number without a value may be 0",
        VALUES,
        "func is not _EQUAL[0]",
        "func is _EQUAL[0]",
        "tests/memory/test_memory_media.py::test_whole_numbers_keep_their_values_on_the_meta_device",
    ),
    (
        "what is written to keeps its old values",
        VALUES,
        "self.twins.pop(given.untyped_storage(), None)",
        "pass",
        "tests/memory/test_memory_media.py::test_whole_numbers_keep_their_values_on_the_meta_device",
    ),
    (
        "packs of the forecast are text",
        ESTIMATE,
        'options | {"example": example}',
        "options",
        "tests/memory/test_memory_media.py::test_all_families_are_traced_without_values",
    ),
]
