"""The step that both sides make: its prompts, the length of each response, and its reward."""

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTHS = ("equal", "tailed")
SIGMA = 0.9  # of the logarithm of long-tailed lengths
TAIL = 4  # the longest of them, over the length of equal ones


@dataclass(frozen=True)
class Case:
    """One step, as a worker gets it."""

    model: str  # a folder, or a name of rft_fn.model
    device: str
    lengths: str  # of LENGTHS
    prompts: int
    group: int
    tokens: int  # of each response where all are equal
    micro: int  # responses a backward of TRL
    budget: int  # tokens a pack of rft_fn
    liger: bool
    steps: int  # measured ones, after one that is not
    flat: float = 0.0  # share of the prompts whose responses have equal rewards
    short: bool = False  # prompts of a few characters, for models with a small window


def texts(case: Case, seed: int = 0) -> list[str]:
    """Word problems of two to eight sentences, or sums of a few characters."""
    draw = random.Random(seed)
    if case.short:
        return [f"{draw.randint(1, 999)}+{draw.randint(1, 999)}=" for _ in range(case.prompts)]
    names = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Henry")
    things = ("apples", "pencils", "stamps", "marbles", "tickets", "books")
    found = []
    for _ in range(case.prompts):
        thing = draw.choice(things)
        said = []
        for _ in range(draw.randint(2, 8)):
            owner, some, less = draw.choice(names), draw.randint(20, 99), draw.randint(2, 20)
            said.append(f"{owner} has {some} {thing} and gives away {less} of them.")
        found.append(" ".join([*said, f"How many {thing} are left in all? Think step by step."]))
    return found


def lengths(case: Case) -> list[int]:
    """The tokens of each of the B = prompts x group responses.

    Long-tailed ones are the quantiles of a log-normal distribution with a median of 0.7 `tokens`, cut at
    four times `tokens`, in an order that the seed draws.
    """
    size = case.prompts * case.group
    if case.lengths == "equal":
        return [case.tokens] * size
    from statistics import NormalDist

    quantiles = [NormalDist().inv_cdf((i + 0.5) / size) for i in range(size)]
    found = [0.7 * case.tokens * math.exp(SIGMA * q) for q in quantiles]
    found = [min(max(round(x), 2), TAIL * case.tokens) for x in found]
    random.Random(1).shuffle(found)
    return found


def warm_up(case: Case) -> tuple[list[str], list[int]]:
    """(prompts, lengths) of the step before those that are measured: as large as they are, with other texts.

    All memory of a step has been touched by then, as in every step of a run but its first ones.
    """
    return texts(case, case.steps), lengths(case)


def flat(case: Case) -> frozenset[str]:
    """The prompts whose responses have equal rewards: the first ones of each step."""
    count = round(case.flat * case.prompts)
    return frozenset(p for i in range(case.steps + 1) for p in texts(case, i)[:count])


def reward(prompt: str, text: str, flat: frozenset[str]) -> float:
    """The share of vowels: any number that differs among responses costs as little; 1 for a flat prompt."""
    return 1.0 if prompt in flat else sum(c in "aeiou" for c in text) / max(len(text), 1)


def weights(model: str) -> tuple[str, str]:
    """(what rft_fn.model.load takes, a word about it). Random weights where SmolLM2 cannot be fetched."""
    from rft_fn import model as model_lib

    if model != "smollm2-135m":
        return model_lib.resolve(model), model
    try:
        return model_lib.resolve(model), model
    except ValueError as error:
        return str(_random_smollm2()), f"RANDOM weights of SmolLM2-135M's shape ({error})"


def window(model: str) -> int:
    """The most tokens that a model reads."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).max_position_embeddings


def _random_smollm2() -> Path:
    """A folder with a Llama of SmolLM2's sizes, and a tokenizer of words for it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from rft_fn.model.model_names import cache_dir

    folder = cache_dir() / "smollm2-shaped"
    if (folder / "model.safetensors").exists():
        return folder
    words = ["<pad>", "<end>", "<unknown>", *(f"w{i}" for i in range(49149))]
    known = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unknown>"))
    known.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special: Any = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    more = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **more)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=known, **special).save_pretrained(folder)
    return folder
