"""A rollout is what an engine's responses say, row by row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rft_fn.engine.requests import Response, assemble

PAD = 7
token = st.integers(0, 40)


@st.composite
def answered(draw):
    """(prompts, n responses to each)."""
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=5), max_size=4))
    n = draw(st.integers(1, 3))
    responses = []
    for _ in range(n * len(prompts)):
        tokens = draw(st.lists(token, max_size=5))
        logp = [-draw(st.floats(0, 9)) for _ in tokens]
        responses.append(Response(tokens, logp, draw(st.booleans())))
    return prompts, responses


@given(answered())
def test_each_row_has_its_prompt_its_response_and_padding(case):
    prompts, responses = case
    rollout = assemble(prompts, responses, pad=PAD, version=3)
    n = len(responses) // max(1, len(prompts))
    assert rollout.tokens.dtype == rollout.length.dtype == torch.long and rollout.logp.dtype == torch.float32
    for row, response in enumerate(responses):
        prompt, sampled = prompts[row // n], len(response.tokens)
        text = [*prompt, *response.tokens]
        rest = rollout.tokens.shape[1] - len(text)
        assert rollout.tokens[row].tolist() == text + [PAD] * rest
        assert rollout.mask[row].tolist() == [False] * len(prompt) + [True] * sampled + [False] * rest
        logp = [0.0] * len(prompt) + torch.tensor(response.logp).tolist() + [0.0] * rest
        assert rollout.logp[row].tolist() == logp
        assert rollout.length[row] == len(text) and rollout.truncated[row] != response.ended
        assert (rollout.group[row], rollout.version[row]) == (row // n, 3)
    assert rollout.tokens.shape == (len(responses), max(rollout.length.tolist(), default=0))


def test_a_log_prob_too_few_is_not_given_to_the_next_row():
    responses = [Response([3, 4], [-1.0], True), Response([5], [-2.0, -3.0], True)]
    with pytest.raises(ValueError, match="response: expected a log-prob for each of 2 tokens, got 1"):
        assemble([[1], [2]], responses, pad=PAD, version=0)
