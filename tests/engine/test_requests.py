"""A rollout is what an engine's responses say, row by row."""

import copy
import warnings

import pytest
import tiny
import torch
from each_case import each
from hypothesis import given
from hypothesis import strategies as st

from rft_fn.engine.requests import Response, assemble, drawn_with
from rft_fn.types import Sampling

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


def test_a_rank_without_prompts_has_temperatures_too():
    """Ranks put their rollouts together leaf by leaf."""
    drawn = drawn_with(assemble([], [], pad=PAD, version=0), Sampling(), [])
    assert drawn.temperature.shape == (0,) and drawn.temperature.dtype == torch.float32
    assert drawn_with(drawn, Sampling()).temperature is None


def test_a_log_prob_too_few_is_not_given_to_the_next_row():
    responses = [Response([3, 4], [-1.0], True), Response([5], [-2.0, -3.0], True)]
    with pytest.raises(ValueError, match="response: expected a log-prob for each of 2 tokens, got 1"):
        assemble([[1], [2]], responses, pad=PAD, version=0)


@each("count, share", [(1, "1 %"), (2, "1 %"), (10, "10 %"), (60, "100 %")])
def test_the_share_of_sampled_ids_without_text_is_said(count, share):
    """Ids of prompts do not count, nor does the last one that the tokenizer knows."""
    size = len(tiny.tokenizer())
    tokens = [size + k % 3 for k in range(count)] + [size - 1] * (100 - count)
    responses = [Response(tokens[:70], [0.0] * 70, True), Response(tokens[70:], [0.0] * 30, True)]
    with pytest.warns(UserWarning, match=f"about {share} of the sampled tokens .*it has {size}"):
        assemble([[size + 9] * 900], responses, pad=0, version=0, tokenizer=tiny.tokenizer())


def test_ids_that_the_tokenizer_knows_are_not_announced():
    """Also ids behind its length, where it has gaps."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    size = len(tokenizer)

    def text_of(token):
        """As a tokenizer of sentencepiece, which raises for ids that it does not have."""
        if token == size + 2:
            raise IndexError("piece id is out of range.")
        return {size + 1: "far"}.get(token)

    tokenizer.convert_ids_to_tokens = text_of
    responses = [Response([3, size - 1, size + 1], [0.0] * 3, True)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assemble([[size + 9]], responses, pad=0, version=0, tokenizer=tokenizer)
    with pytest.warns(UserWarning, match="about 10 %"):
        assemble([[3]], [Response([size] + [3] * 8, [0.0] * 9, True)], pad=0, version=0, tokenizer=tokenizer)
    with pytest.warns(UserWarning, match="about 100 %"):
        assemble([[3]], [Response([size, size + 2], [0.0] * 2, True)], pad=0, version=0, tokenizer=tokenizer)
