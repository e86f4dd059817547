"""Folders of peft's adapters for a reward model: scores are those of peft's own class."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_reward_model_folders import classifier, ours, theirs

from rft_fn import model
from rft_fn.model import Head

HEAD = "base_model.model.score.weight"


def base_of(folder, kind):
    """A model that adapters are for: without a head, or with one that they replace."""
    if kind == "language model":
        model.save(folder, tiny.llama(), tiny.tokenizer())
    else:
        classifier("Llama", labels=3, dtype=torch.float32).save_pretrained(folder)
    return folder


def adapters(folder, base, labels=2):
    """What peft saves of adapters and a head with numbers that differ from those that they start from."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    how = {"num_labels": labels, "ignore_mismatched_sizes": True}
    lm = AutoModelForSequenceClassification.from_pretrained(base, **how)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="SEQ_CLS")
    lm = get_peft_model(lm, lora)
    g = torch.Generator().manual_seed(0)
    for name, p in lm.named_parameters():
        if p.requires_grad:
            p.data = torch.randn(p.shape, generator=g) * 0.3
            assert "lora_" in name or "score" in name
    lm.save_pretrained(folder)
    return folder


def by_peft(folder, labels=2):
    """[B, H]: the scores by peft's own class."""
    from peft import AutoPeftModelForSequenceClassification

    how = {"num_labels": labels, "ignore_mismatched_sizes": True}
    return theirs(AutoPeftModelForSequenceClassification.from_pretrained(folder, **how).eval())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_of(tmp_path_factory.mktemp("base") / "lm", "language model")


@pytest.mark.parametrize("kind", ["language model", "reward model"])
def test_scores_are_those_of_pefts_class(kind, tmp_path):
    folder = adapters(tmp_path / "adapters", base_of(tmp_path / "base", kind))
    want = by_peft(folder)
    for meta in (False, True):
        rm = model.load_reward(folder, meta=meta)
        bound = tiny.output_rounding(rm, rm.score.weight)
        torch.testing.assert_close(ours(rm), want, rtol=0, atol=bound)
    assert [head.name for head in rm.heads] == ["LABEL_0", "LABEL_1"]
    assert want.abs().max() > 0.1 and (want - without_adapters(tmp_path / "base", folder)).abs().max() > 0.1


def without_adapters(base, folder):
    """[B, 2]: the scores of the head beside the adapters, by the base model alone."""
    rm = model.load_reward(base, heads=("a", "b"), new=True)
    rm.score.weight.data = load_file(folder / "adapter_model.safetensors")[HEAD]
    return ours(rm)


def test_adapters_and_head_are_trained_further_and_saved_whole(base, tmp_path):
    folder = adapters(tmp_path / "adapters", base, labels=1)
    rm = model.load_reward(folder, heads=("helpful",))
    assert rm.heads == (Head("helpful"),)
    trained = [name for name, p in rm.named_parameters() if p.requires_grad]
    assert "score.weight" in trained and all("lora_" in x or x == "score.weight" for x in trained)
    whole = model.load_reward(model.save_reward(tmp_path / "whole", rm))
    bound = tiny.output_rounding(rm, rm.score.weight)
    torch.testing.assert_close(ours(whole), by_peft(folder, 1), rtol=0, atol=bound)


def test_they_are_no_language_model(base, tmp_path):
    folder = adapters(tmp_path / "adapters", base)
    with pytest.raises(ValueError, match=r"got adapters of a reward model; model.load_reward loads it"):
        model.load(folder)


def test_new_heads_on_their_adapters(base, tmp_path):
    rm = model.load_reward(adapters(tmp_path / "adapters", base), new=True, pool="mean")
    assert rm.heads == (Head("score"),) and (rm.score.weight == 0).all()
    assert any("lora_" in name for name, _ in rm.named_parameters())


@pytest.mark.parametrize(
    "change, said",
    [
        ({"base_model_name_or_path": "/nowhere"}, r"its base model /nowhere is not there"),
        ({"base_model_name_or_path": None}, r"expected base_model_name_or_path, got none"),
        (
            {"task_type": "CAUSAL_LM"},
            r"with heads, got one without \(adapters with task_type CAUSAL_LM, not SEQ",
        ),
        ({"use_dora": True}, r"expected plain LoRA adapters, got use_dora"),
    ],
)
def test_a_config_that_does_not_fit(change, said, base, tmp_path):
    folder = adapters(tmp_path / "adapters", base)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=said) as error:
        model.load_reward(folder)
    assert "\n" not in str(error.value)


def test_tensors_that_do_not_fit(base, tmp_path):
    folder = adapters(tmp_path / "adapters", base)
    path = folder / "adapter_model.safetensors"
    whole = load_file(path)
    save_file({name: x for name, x in whole.items() if name != HEAD}, path)
    with pytest.raises(ValueError, match=r"expected a head base_model.model.score.weight .*, got none"):
        model.load_reward(folder)
    save_file(whole | {"base_model.model.score.bias": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"unexpected .*score.bias"):
        model.load_reward(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"expected adapter_model.safetensors, got none"):
        model.load_reward(folder)
