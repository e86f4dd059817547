"""Small students: a model of a changed config, with fresh weights."""

import pytest
import torch

import rft_fn as rft


def test_a_student_has_the_changed_shape_and_fresh_weights():
    torch.manual_seed(3)
    one = rft.model.load("tiny", num_hidden_layers=1)
    torch.manual_seed(3)
    again = rft.model.load("tiny", num_hidden_layers=1)
    torch.manual_seed(4)
    other = rft.model.load("tiny", num_hidden_layers=1)
    whole = rft.model.load("tiny")
    assert one.config.num_hidden_layers == 1 < whole.config.num_hidden_layers
    assert one.config.vocab_size == whole.config.vocab_size and not one.training
    assert sum(p.numel() for p in one.parameters()) < sum(p.numel() for p in whole.parameters())
    same = [torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters())]
    assert all(same) and not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def test_a_student_learns():
    torch.manual_seed(0)
    st = rft.strategy.get_strategy()
    apply, state = st.init(rft.model.load("tiny", num_hidden_layers=1), rft.optim.adamw(1e-2))
    exp = rft.packing.supervised([([5, 6], [7, 8, 1])])
    before = st.score(apply, state.params, exp, 64).logp.sum()
    for _ in range(10):
        grads, _ = st.grad(state, apply, lambda out, b: rft.loss.nll(out.logp), st.shard(exp, 64))
        state, _ = st.update(state, grads)
    assert st.score(apply, state.params, exp, 64).logp.sum() > before + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_hiden_layers": 1},
            "num_hiden_layers: expected a field of the model's config, got 1; "
            "did you mean num_hidden_layers?",
        ),
        ({"wibble": 1}, "wibble: expected a field of the model's config, got 1"),
        (
            {"num_hidden_layers": 1, "meta": True},
            "num_hidden_layers: expected no change of the config with meta",
        ),
    ],
)
def test_a_keyword_that_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError) as error:
        rft.model.load("tiny", **options)
    assert str(error.value) == message


def test_numbers_that_make_no_model_are_one_line():
    with pytest.raises(ValueError, match=r"^hidden_size: expected a config .*got hidden_size='x'") as e:
        rft.model.load("tiny", hidden_size="x")
    assert "\n" not in str(e.value)


def test_keywords_of_from_pretrained_still_reach_it():
    assert rft.model.load("tiny", attn_implementation="eager").config._attn_implementation == "eager"
