"""The limit on the mismatch of trainer and sampler, in the types that both compute in."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from each_case import each
from test_house import load_script as script
from transformers import AutoModelForCausalLM, Qwen2Config

import rft_fn as rft
from rft_fn import collect, engine, precision, sync
from rft_fn.run.off_policy import limited_gap
from rft_fn.strategy import StrategyConfig

SMALL = {"prompts": 4, "group": 4, "steps": 3, "eval_prompts": 4}


@pytest.fixture
def in_bfloat16(monkeypatch):
    """Models are loaded in bfloat16, as on a GPU: the trainer's, the engine's, and the copy of the canary."""
    monkeypatch.setattr(sys.modules["rft_fn.model.load"], "usual_dtype", lambda device: torch.bfloat16)


@pytest.fixture(scope="module")
def peaked(tmp_path_factory):
    """Folders of a model with random weights and tiny's tokens, by the deviation of its logits."""

    def save(spread):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=48,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            initializer_range=0.1,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():  # hidden states have a root mean square of 1 after the last norm
            lm.lm_head.weight.normal_(0, spread / 16)
        folder = tmp_path_factory.mktemp(f"peaked{spread}")
        lm.save_pretrained(folder)
        rft.model.load_tokenizer("tiny").save_pretrained(folder)
        return str(folder)

    return {spread: save(spread) for spread in (3, 6)}


def positions_shifted(build, config, model, tokenizer):
    """Behind the prompt, tokens have a position that is one too many."""
    lm = rft.model.load(model)
    inner = build(config, lm, tokenizer)
    inner.generate([[3, 4]], [0], sampling=rft.Sampling(max_new=2))  # its probe would not use the cache

    def shift(module, args, options):
        if options["position_ids"].shape[-1] == 1:
            options["position_ids"] = options["position_ids"] + 1
        return args, options

    lm.register_forward_pre_hook(shift, with_kwargs=True)
    return inner


def hotter(build, config, model, tokenizer):
    """It draws at a temperature of 0.7, whatever it is asked for."""
    inner = build(config, model, tokenizer)

    def generate(*args, sampling, **more):
        found = inner.generate(*args, sampling=rft.tree.replace(sampling, temperature=0.7), **more)
        return rft.tree.replace(found, sampling=sampling)

    return inner._replace(generate=generate)


def templated(build, config, model, tokenizer):
    """It reads other tokens before each prompt, as those of a system prompt."""
    inner = build(config, model, tokenizer)
    system = tokenizer.encode("12+34=")

    def generate(prompts, *args, **more):
        found = inner.generate([system + list(p.ids) for p in prompts], *args, **more)
        cut = len(system)
        return rft.tree.replace(
            found,
            tokens=found.tokens[:, cut:],
            mask=found.mask[:, cut:],
            logp=found.logp[:, cut:],
            length=found.length - cut,
        )

    return inner._replace(generate=generate)


def train(folder, model, **options):
    """The rows of metrics.jsonl of a few steps of grpo.py."""
    grpo = script("grpo")
    grpo.main(grpo.Config(**SMALL, model=model, out=str(folder), **options))
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("spread", [3, 6])
def test_peaked_logits_in_bfloat16_train_with_the_defaults(peaked, tmp_path, capsys, spread):
    """Their noise is above the limit of float32, which would end the run at its canary."""
    rows = train(tmp_path / "r", peaked[spread])
    assert len(rows) == 3 and all(1e-3 < row["policy/logp_gap"] < 0.08 for row in rows)
    noise = re.search(r"noise on the weights, (\S+) without", capsys.readouterr().out)
    assert 0.01 < float(noise[1]) < 0.06
    with pytest.raises(sync.CanaryError, match=r"\(limit 0.01\)"):
        train(tmp_path / "old", peaked[spread], max_gap=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("fault", [positions_shifted, hotter, templated])
def test_faults_of_a_sampler_are_caught_in_bfloat16(peaked, tmp_path, monkeypatch, fault):
    """By the canary, and without it by the gap of the first step."""
    monkeypatch.setattr(engine, "get_engine", partial(fault, engine.get_engine))
    with pytest.raises(sync.CanaryError, match=r"\(limit 0.08\)"):
        train(tmp_path / "canary", peaked[3])
    with pytest.raises(ValueError, match=r"logp_gap is .* above the limit of 0\.08"):
        train(tmp_path / "gap", peaked[3], canary=False)


WIDE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


@each(
    ("types", "limit"),
    [
        ([], 0.01),
        ([WIDE], 0.01),
        ([torch.float64, WIDE], 0.01),
        ([WIDE, HALF], 0.02),
        ([BRAIN, WIDE], 0.08),
        ([HALF, BRAIN], 0.08),
    ],
)
def test_the_coarser_type_decides(types, limit):
    assert precision.gap_by_rounding(types) == limit


def saying(dtype):
    """An engine that only tells the type that it computes in; a server tells none."""
    status = {"engine": "openai", "alive": True, "version": 0, "asleep": False, "supported": frozenset()}
    return engine.hf(tiny.llama(), tiny.tokenizer())._replace(
        status=lambda: status if dtype is None else {**status, "computes": dtype}
    )


@pytest.mark.parametrize(
    ("options", "trainer", "sampler", "limit"),
    [
        ({}, WIDE, WIDE, 0.01),
        ({}, WIDE, BRAIN, 0.08),
        ({}, WIDE, HALF, 0.02),
        ({}, BRAIN, WIDE, 0.08),
        ({}, BRAIN, None, 0.08),  # a server does not say: the trainer's type decides
        ({}, WIDE, None, 0.01),
        ({"strategy": StrategyConfig(bf16=True)}, WIDE, WIDE, 0.08),
        ({"max_gap": 0.01}, BRAIN, BRAIN, 0.01),  # what is given wins, as in the config of an older run
        ({"max_gap": 0.5}, WIDE, WIDE, 0.5),
    ],
)
def test_the_limit_of_a_step_goes_by_the_types_of_both_sides(monkeypatch, options, trainer, sampler, limit):
    limits = []
    monkeypatch.setattr(collect, "check_mismatch", lambda found, limit, *rest, **more: limits.append(limit))
    apply, params = rft.model.bind(tiny.llama().to(trainer))
    values = dict.fromkeys(collect.MISMATCH, 1e-3) | {"rollout/staleness_max": 0.0}
    given = (values, None, rft.Sampling(), apply, params, [])
    cfg = script("grpo").Config(**options)
    limited_gap(cfg, 0.0, *given, engine=saying(sampler), config=cfg.strategy)
    assert limits == [limit]
