"""What the tests of vLLM share: the engine on the embedded default, and the trainer's view of it."""

from importlib.util import find_spec

import pytest
import torch

import rft_fn as rft
from rft_fn import data, engine, model, packing, weight

__all__ = ["NAME", "build", "gap", "inside", "needs_vllm", "prompts_of", "reference", "tokenizer", "trained"]

NAME = "tiny"


def _there():
    """Whether the package is installed: a folder of the same name in the tests is none."""
    found = find_spec("vllm")
    return found is not None and found.origin is not None


needs_vllm = pytest.mark.skipif(not _there(), reason="vllm is not installed: make test-vllm installs it")


def tokenizer():
    return model.load_tokenizer(NAME)


def build(module_or_name=NAME, **options):
    config = engine.EngineConfig(type="vllm", batch=64, **options)
    return engine.get_engine(config, module_or_name, tokenizer())


def inside(eng):
    """The InProcess of an engine."""
    return eng.status.__self__.core


def prompts_of(count):
    """Questions of several lengths, some of two blocks of the cache."""
    sets = [data.load(f"sort_digits:{level}", tokenizer(), template="{short}") for level in (1, 4)]
    found = [p.ids for i in range(count) for p in data.take(sets[i % 2], i // 2 + 1, seed=3)[0][-1:]]
    return [(ids * 10)[: 70 if i % 3 == 2 else len(ids)] for i, ids in enumerate(found)]


def reference(lm, rollout, sampling=rft.Sampling(), *, budget=256):  # noqa: B008
    """[B, S]: the trainer's log-probs of a rollout."""
    count = len(rollout.tokens)
    exp = rft.experience(rollout, adv=torch.zeros(count), w=weight.token_mean(rollout.mask))
    packs = packing.shard(exp, budget)[0]
    apply, params = model.bind(lm, sampling=sampling)
    return packing.unpack(model.score(apply, params, packs), packs, exp.w)


def gap(lm, rollout, sampling=rft.Sampling()):  # noqa: B008
    """Most that trainer and sampler differ about a token [nats]."""
    return float((reference(lm, rollout, sampling) - rollout.logp).abs().max())


def trained(scale, *, only="", seed=0):
    """The embedded default after an update of this size relative to each weight."""
    lm = model.load(NAME)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if only in name:
                p.add_(scale * p.abs().mean() * torch.randn(p.shape, generator=generator))
    return lm
