"""Mutants of scalar reward models: pooling, folders, calibration; each is killed by the test beside it."""

_POOL = "tests/model/test_reward_model.py::"
_FOLDER = "tests/model/test_reward_model_folders.py::"
_ADAPTERS = "tests/model/test_reward_model_adapters.py::"
_CALIBRATION = "tests/model/test_reward_model_calibration.py::"

MUTANTS = [
    (
        "the head beside adapters is read as that of another task",
        "rft_fn/model/reward_folder.py",
        'if kind != "SEQ_CLS":',
        "if not kind:",
        _ADAPTERS + "test_a_config_that_does_not_fit",
    ),
    (
        "the base model of adapters is scored without them",
        "rft_fn/model/reward_folder.py",
        'with_adapter(lm, folder, without="score")',
        "lm",
        _ADAPTERS + "test_scores_are_those_of_pefts_class",
    ),
    (
        "a mean is over one token more than there are",
        "rft_fn/model/reward.py",
        "1 / (pack.pos + 1).double()",
        "1 / (pack.pos + 2).double()",
        _POOL + "test_scores_are_those_of_each_row_alone[14-mean]",
    ),
    (
        "softmax weights reach into the sequence before",
        "rft_fn/model/reward.py",
        "same = seq[reach:] == seq[:-reach]",
        "same = seq[reach:] >= seq[:-reach]",
        _POOL + "test_running_means_are_the_definition",
    ),
    (
        "softmax weights are over the last two tokens",
        "rft_fn/model/reward.py",
        "        reach *= 2",
        "        reach *= len(logit)",
        _POOL + "test_running_means_are_the_definition",
    ),
    (
        "a mean is over the tokens that follow",
        "rft_fn/model/reward.py",
        "(share[:, None] * value).T, reverse=False).T",
        "(share[:, None] * value).T, reverse=True).T",
        _POOL + "test_running_means_are_the_definition",
    ),
    (
        "shares of long sequences are in float32",
        "rft_fn/model/reward.py",
        "    logit = logit.double()\n",
        "",
        _POOL + "test_a_mean_over_a_long_sequence_in_float32",
    ),
    (
        "attention pools by the last head's value",
        "rft_fn/model/reward.py",
        "softmax_share(out.score[:, -1], pack.seq)",
        "softmax_share(score[:, -1], pack.seq)",
        _POOL + "test_scores_are_those_of_each_row_alone[14-attention]",
    ),
    (
        "tokens outside the mask have scores",
        "rft_fn/model/reward.py",
        "score=torch.where(pack.mask[:, None], score, 0)",
        "score=score",
        _POOL + "test_scores_are_those_of_each_row_alone[14-last]",
    ),
    (
        "what was read of a sequence is not pooled",
        "rft_fn/model/reader.py",
        "return self.finish(self._read_whole(pack), pack)",
        "return self._read_whole(pack)",
        _POOL + "test_scores_are_those_of_each_row_alone[14-mean]",
    ),
    (
        "the score of a row is that of its first step",
        "rft_fn/model/calibration.py",
        "mask.shape[1] - 1 - mask.flip(1).int().argmax(1)",
        "mask.int().argmax(1)",
        _POOL + "test_scores_are_those_of_each_row_alone[14-last]",
    ),
    (
        "a head is read in the type of the model",
        "rft_fn/model/reward_folder.py",
        "_Source(lm, {_SCORE: _in_files(folder, head.weight.detach())}, heads, pool)",
        "_Source(lm, {_SCORE: head.weight.detach()}, heads, pool)",
        _FOLDER + "test_a_saved_model_is_the_same[dtype2-last]",
    ),
    (
        "the heads of an earlier model stay in a folder",
        "rft_fn/model/reward.py",
        "        Path(folder, self.file).unlink(missing_ok=True)  # of a model that stood here before\n",
        "",
        _FOLDER + "test_the_same_folder_may_be_written_again_with_another_pooling",
    ),
    (
        "a reward model loads as a language model with a new head",
        "rft_fn/model/load.py",
        '    _require_language(name, how["trust_remote_code"])\n',
        "",
        _FOLDER + "test_folders_that_do_not_fit",
    ),
    (
        "a temperature is fitted to labels of 1",
        "rft_fn/model/calibration.py",
        "label = (len(margin) + 1) / (len(margin) + 2)",
        "label = 1.0",
        _CALIBRATION + "test_the_temperature_has_the_least_cross_entropy",
    ),
    (
        "a scale of 0 passes",
        "rft_fn/model/calibration.py",
        "math.isfinite(self.scale) and self.scale > 0",
        "math.isfinite(self.scale) and self.scale >= 0",
        _CALIBRATION + "test_bad_input",
    ),
]
