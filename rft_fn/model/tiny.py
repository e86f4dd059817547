"""The built-in default model: a character-level decoder of 0.33 M parameters.

A few steps of supervised fine-tuning on generated examples warm it up: enough for the form of an answer,
while the content is right little more often than by chance. The rest is left to reinforcement learning.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch

from rft_fn import loss, optim, packing, rng
from rft_fn.model.bind import bind
from rft_fn.model.save import save
from rft_fn.types import Experience, Sampling

__all__ = ["build", "cache_name", "new_model", "new_tokenizer"]

SIZE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
STEPS = 20
BATCH = 64
LR = 3e-3
WINDOW = 128
TEMPLATE = "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}{% endfor %}"


def parse(name: str) -> tuple[str, int]:
    """(task, level) of "tiny:TASK:LEVEL"; "tiny" is sort_digits at level 1."""
    parts = name.split(":")[1:]
    defaults = ["sort_digits", "1"]
    parts += defaults[len(parts) :]
    if len(parts) != 2 or not parts[1].isdigit():
        raise ValueError(f"model: expected tiny, tiny:TASK or tiny:TASK:LEVEL, got {name!r}")
    return parts[0], int(parts[1])


def cache_name(name: str) -> str:
    """A folder name that changes when anything does that the weights depend on."""
    text = repr((parse(name), SIZE, STEPS, BATCH, LR, WINDOW, TEMPLATE, torch.__version__))
    text += Path(__file__).read_text()
    return f"tiny-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def new_tokenizer() -> Any:
    """A tokenizer of one token per character of the tasks' alphabet.

    It has pad, end and unknown tokens besides. Its chat template is the bare question.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from rft_fn.data.tasks import ALPHABET

    vocab = {c: i for i, c in enumerate(["<pad>", "<end>", "<unk>", *ALPHABET])}
    core: Any = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **names)


def new_model(vocab: int, seed: int) -> Any:
    """A Llama of SIZE with weights drawn from `seed`, without touching torch's global generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = SIZE | {
        "vocab_size": vocab,
        "num_key_value_heads": SIZE["num_attention_heads"],
        "max_position_embeddings": WINDOW,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    config = LlamaConfig(**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _batch(task: Any, level: int, tokenizer: Any, seed: int, step: int) -> Experience:
    """Questions and answers of a task as an Experience; the mask is the answer."""
    pairs = []
    for i in range(BATCH):
        row = task.generate(seed, step * BATCH + i, level)
        answer = [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]
        pairs.append((tokenizer.encode(row["short"]), answer))
    return packing.supervised(pairs)


def build(out: Path, name: str, *, seed: int = 0) -> None:
    """Build, warm up and save model and tokenizer for the task in `name`.

    The training loop is pure: torch.func.grad over the bound model.
    """
    from rft_fn.data.tasks import get_task

    # A new model for the alphabet of the tasks.
    task, level = parse(name)
    tokenizer = new_tokenizer()
    lm = new_model(len(tokenizer), seed)
    apply, params = bind(lm, sampling=Sampling())
    tx = optim.adamw(optim.warmup_cosine(LR, STEPS // 2, STEPS))
    opt = tx.init(params)

    def total(p: Any, pack: Any) -> torch.Tensor:
        return (pack.w * loss.nll(apply(p, pack).logp)).sum()

    # A few steps of supervised fine-tuning on questions and their answers.
    for step in range(STEPS):
        exp = _batch(get_task(task), level, tokenizer, rng.fold_in(seed, "warm-up"), step)
        pack = packing.pack(exp, range(BATCH))
        updates, opt = tx.update(torch.func.grad(total)(params, pack), opt, params)
        optim.apply_updates(params, updates)
    save(out, lm, tokenizer)
