"""Mutants of prompts that their samples read in one place."""

PROMPTS, BATCH = "rft_fn/engine/hf/prompts.py", "rft_fn/engine/hf/batch.py"
_P = "tests/engine/test_prompts.py::test_"
ALL = _P + "rows_attend_to_all_of_their_tokens"
SAME = _P + "samples_are_those_without[Llama]"

MUTANTS = [
    (
        "padding of a prompt is seen",
        PROMPTS,
        "        if not self.seen.all():\n            bias",
        "        if not self.seen.any():\n            bias",
        ALL,
    ),
    (
        "the prompt and the own tokens have a softmax each",
        PROMPTS,
        "    p = torch.cat([scores, own], -1).softmax(-1)",
        "    p = torch.cat([scores.softmax(-1), own.softmax(-1)], -1)",
        ALL,
    ),
    (
        "the rank of a row is that of another one",
        PROMPTS,
        "        self.groups[self.of, self.rank] = rows\n",
        "        self.groups[self.of, self.rank] = by_prompt\n",
        ALL,
    ),
    (
        "prompts that join are those that were there",
        PROMPTS,
        "        self.of = torch.cat([self.of, other.of + len(self.seen)])",
        "        self.of = torch.cat([self.of, other.of])",
        ALL,
    ),
    (
        "padding of prompts that join is on the other side of their keys",
        PROMPTS,
        "torch.cat([_padded(x, width, dim=1) for x in (self.seen, other.seen)])",
        "torch.cat([_padded(x.flip(1), width, dim=1).flip(1) for x in (self.seen, other.seen)])",
        ALL,
    ),
    (
        "columns that some prompt needs are let go",
        PROMPTS,
        "        empty = int(self.seen.any(0).int().argmax())",
        "        empty = int(self.seen.all(0).int().argmax())",
        ALL,
    ),
    (
        "no prompt is ever let go",
        PROMPTS,
        "        if 2 * len(left) <= len(self.seen):",
        "        if not len(left):",
        _P + "prompts_without_rows_are_let_go",
    ),
    (
        "rows stand at the places of their own tokens alone",
        BATCH,
        "        self.before = self.seen.sum(-1)\n",
        "",
        SAME,
    ),
    (
        "rows that join have read nothing",
        BATCH,
        "        self.before = torch.cat([self.before, other.before])",
        "        self.before = torch.cat([self.before, 0 * other.before])",
        SAME,
    ),
    (
        "one sample shares a prompt with nobody",
        "rft_fn/engine/hf/engine.py",
        "        if n == 1:\n            batching",
        "        if n == 0:\n            batching",
        _P + "one_sample_shares_with_nobody",
    ),
    (
        "places are kept when rows leave",
        PROMPTS,
        "        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}",
        "        self._known = vars(self).get('_known', {})",
        ALL,
    ),
    (
        "a window is overlooked",
        PROMPTS,
        '("sliding_window", "softcap", ',
        '("softcap", ',
        _P + "a_feature_is_refused_by_its_name[sliding_window]",
    ),
    (
        "attention stays ours where a forward fails",
        PROMPTS,
        "    try:\n        yield\n    finally:\n        use(lm, usual)",
        "    yield\n    use(lm, usual)",
        _P + "the_models_attention_is_its_own_again",
    ),
]
