"""Mutants of what is read of a model's files, and of weights in low precision."""

CONVERT, STORED = "rft_fn/model/convert.py", "rft_fn/model/stored.py"
MATERIALIZE, LORA = "rft_fn/model/materialize.py", "rft_fn/model/lora.py"
LOADED = "tests/model/test_materialize.py::test_without_memory_first_a_model_is_what_transformers_loads"

MUTANTS = [
    (
        "expert 10 comes before expert 2",
        CONVERT,
        "sorted(stored, key=loading.dot_natural_key)",
        "sorted(stored)",
        f"{LOADED}[Qwen3Moe-dtype0]",
    ),
    (
        "a model forgets the names that it was loaded by",
        CONVERT,
        "[rule for rule in rules if rule.was_used()]",
        "[]",
        f"{LOADED}[Mixtral-dtype0]",
    ),
    (
        "persistent buffers start again from what the library begins with",
        MATERIALIZE,
        "                home._is_hf_initialized = True\n",
        "",
        f"{LOADED}[Gemma4Text-dtype0]",
    ),
    (
        "all weights are as narrow as the model",
        MATERIALIZE,
        "    _keep_wide(made, dtype)\n",
        "",
        f"{LOADED}[GptOss-dtype2]",
    ),
    (
        "a persistent buffer may be missing",
        STORED,
        "told.missing_keys | parameters",
        "parameters",
        "tests/model/test_materialize.py::test_tensors_that_a_model_cannot_be_made_of",
    ),
    (
        "a head is tied whatever the files hold",
        STORED,
        "                    _separate(out.skeleton, other.name)\n",
        "                    pass\n",
        "tests/model/test_materialize.py::test_a_head_that_only_the_config_ties_stays_apart",
    ),
    (
        "an engine samples from layers that were not quantised",
        LORA,
        "if is_low(p) and name",
        "if not is_low(p) and name",
        "tests/model/test_quantize.py::test_adapters_learn_over_a_frozen_base_and_the_engine_samples_from_it",
    ),
    (
        "a quantised model trains what is left of it",
        "rft_fn/strategy/local.py",
        "    quantize.require_adapters(module)\n",
        "",
        "tests/model/test_quantize.py::test_what_cannot_hold_it_says_so",
    ),
    (
        "a merged model is written as if it were quantised",
        "rft_fn/model/save.py",
        "_written_here(module), _in_full(module),",
        "_written_here(module),",
        "tests/model/test_quantize.py::test_merged_it_is_saved_in_full_and_apart_it_is_adapters",
    ),
    (
        "an estimate counts four bytes for one",
        "rft_fn/memory/estimate.py",
        "            total += quantize.nbytes(p)\n",
        "            total += 4 * p.numel()\n",
        "tests/model/test_quantize.py::test_an_estimate_counts_its_bytes",
    ),
]
