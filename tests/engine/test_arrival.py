"""A load has to bring every weight of the engine's model, tied ones once, and nothing else."""

import copy

import pytest
import tiny
import torch

import rft_fn as rft
from rft_fn import engine, model, optim
from rft_fn.engine.weight_folder import manifest
from rft_fn.model.lora_merged import Export

PROMPTS, KEYS = [[3, 4, 5], [6, 7]], [1, 2]


def sampled(eng):
    return eng.generate(PROMPTS, KEYS, n=2, sampling=rft.Sampling(max_new=6)).tokens


def tied():
    lm = tiny.llama(3)
    lm.config.tie_word_embeddings = True
    lm.lm_head.weight = lm.model.embed_tokens.weight
    return lm


def test_what_was_delivered_is_counted():
    lm = tiny.llama(5)
    delivered = engine.hf(tiny.llama(), tiny.tokenizer()).load(lm.named_parameters(), version=3)
    sizes = [p.numel() for p in lm.parameters()]
    assert delivered.tensors == len(sizes) and delivered.bytes == 4 * sum(sizes)
    assert delivered.version == 3 and 0 < delivered.seconds < 60


def test_a_weight_that_does_not_arrive_is_named():
    lm = tiny.llama(5)
    weights = [(name, p) for name, p in lm.named_parameters() if "o_proj" not in name]
    left_out = len(list(lm.parameters())) - len(weights)
    first = next(name for name, _ in lm.named_parameters() if "o_proj" in name)
    assert left_out > 1
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    with pytest.raises(ValueError, match=rf"^weights: {first}: .* got {len(weights)} .*{left_out} mis"):
        eng.load(weights, version=1)


def test_an_export_that_was_read_before_is_refused():
    """Its second reader gets nothing, and would keep the old weights under the new version."""
    state = tiny_state(tiny.llama(5))
    export = rft.strategy.get_fake_strategy().export(state)
    engine.hf(tiny.llama(), tiny.tokenizer()).load(export, version=1)
    with pytest.raises(ValueError, match=r"got 0 without it .*that has not been read yet"):
        engine.hf(tiny.llama(), tiny.tokenizer()).load(export, version=1)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_weight_may_arrive_by_either_name(name):
    lm = tied()
    weights = dict(lm.named_parameters())
    x = weights.pop("model.embed_tokens.weight")
    eng = engine.hf(tied().requires_grad_(False), tiny.tokenizer())
    delivered = eng.load({**weights, name: x + 1}.items(), version=1)
    assert delivered.tensors == len(weights) + 1
    want = copy.deepcopy(lm)
    want.model.embed_tokens.weight.data += 1
    assert torch.equal(sampled(eng), sampled(engine.hf(want, tiny.tokenizer())))


def test_a_whole_state_dict_may_arrive_buffers_too():
    lm = tiny.llama(5)
    lm.register_buffer("bias", torch.ones(3))
    own = tiny.llama()
    own.register_buffer("bias", torch.zeros(3))
    eng = engine.hf(own, tiny.tokenizer())
    assert eng.load(lm.state_dict().items(), version=1).tensors == len(lm.state_dict())
    assert torch.equal(own.bias, torch.ones(3))
    eng.load(lm.named_parameters(), version=2)  # buffers need not come
    assert torch.equal(sampled(eng), sampled(engine.hf(lm, tiny.tokenizer())))


def test_the_manifest_has_every_name_of_a_tied_weight():
    found = manifest(tied())
    both = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
    assert found.required["model.embed_tokens.weight"] == both
    assert "lm_head.weight" not in found.required and both <= set(found.shape)


def tiny_state(lm, trained=None):
    """The state of a model of which only the parameters whose names contain `trained` are trained."""
    for name, p in lm.named_parameters():
        p.requires_grad_(trained is None or trained in name)
    _, state = rft.strategy.get_fake_strategy().init(lm, optim.adamw(0.1))
    return state


def test_weights_that_nothing_trains_need_not_arrive():
    """The engine has them from the model that both were made of; each trained one has to come."""
    state = tiny_state(tiny.llama(), trained="mlp")
    st = rft.strategy.get_fake_strategy()
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    assert eng.load(st.export(state), version=1).tensors == len(state.params)

    class Short(Export):
        """An export that loses its last tensor."""

        def _copies(self):
            yield from list(super()._copies())[:-1]

    with pytest.raises(ValueError, match="1 missing in all"):
        eng.load(Short(state.params, state.module, torch.Tensor.detach), version=2)


def test_adapters_arrive_as_the_weights_of_their_layers():
    module = model.apply_lora_configuration(tiny.llama(), 2, 4, target_modules=["q_proj", "v_proj"])
    _, state = rft.strategy.get_fake_strategy().init(module, optim.adamw(0.1))
    export = rft.strategy.get_fake_strategy().export(state)
    plain = {name for name, _ in tiny.llama().named_parameters()}
    adapted = {name for name in plain if "q_proj" in name or "v_proj" in name}
    assert export.frozen == plain - adapted
    assert {name for name, _ in export} == adapted
    eng = engine.hf(tiny.llama(), tiny.tokenizer())
    weights = rft.strategy.get_fake_strategy().export(state)
    assert eng.load(weights, version=1).tensors == len(adapted)
