"""The built-in default model: a character-level decoder of 0.33 M parameters.

A few steps of supervised fine-tuning on generated examples warm it up: enough for the form of an answer,
while the content is right little more often than by chance. The rest is left to reinforcement learning.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

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
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'tool' %}={% endif %}{% endfor %}"
)


def parse(name: str) -> tuple[str, int]:
    """(task or environment, level) of "tiny:TASK:LEVEL"; "tiny" is sort_digits at level 1."""
    parts = name.split(":")[1:]
    defaults = ["sort_digits", "1"]
    parts += defaults[len(parts) :]
    if len(parts) != 2 or not parts[1].isdigit():
        raise ValueError(f"model: expected tiny, tiny:TASK or tiny:TASK:LEVEL, got {name!r}")
    return parts[0], int(parts[1])


def cache_name(name: str) -> str:
    """A folder name that changes when anything does that the weights depend on."""
    _, texts, steps = _teaching(*parse(name))
    text = repr((parse(name), SIZE, steps, texts, BATCH, LR, WINDOW, TEMPLATE, torch.__version__))
    text += Path(__file__).read_text()
    return f"tiny-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def new_tokenizer(texts: Sequence[str] = ()) -> Any:
    """A tokenizer of one token per character of the tasks' alphabet, and of one for each of `texts`.

    It has pad, end and unknown tokens besides. Its chat template is the bare question; what a tool says ends
    with "=", as questions do.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from rft_fn.data.tasks import ALPHABET

    vocab = {c: i for i, c in enumerate(["<pad>", "<end>", "<unk>", *ALPHABET])}
    core: Any = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **names)
    tokenizer.add_tokens(list(texts))
    return tokenizer


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


class _Teach(Protocol):
    """Makes examples to warm up on."""

    def __call__(self, tokenizer: Any, seed: int, index: int, /) -> list[tuple[list[int], list[int]]]:
        """(the tokens before a response, those of the response) for each response of one problem."""
        ...


def _teaching(task: str, level: int) -> tuple[_Teach, tuple[str, ...], int]:
    """(what is taught, the texts that are one token each, the steps) for a task or an environment."""
    from rft_fn import environment
    from rft_fn.data.tasks import TASKS, get_task

    if task in environment.ENVIRONMENTS and task not in TASKS:
        env = environment.get_environment(f"{task}:{level}")

        def play(tokenizer: Any, seed: int, index: int) -> list[tuple[list[int], list[int]]]:
            return environment.lessons(env, environment.Renderer(tokenizer), seed, index)

        return play, env.tokens, env.warm_up

    generate = get_task(task).generate

    def answer(tokenizer: Any, seed: int, index: int) -> list[tuple[list[int], list[int]]]:
        row = generate(seed, index, level)
        return [(tokenizer.encode(row["short"]), [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id])]

    return answer, (), STEPS


def _batch(teach: _Teach, tokenizer: Any, seed: int, step: int) -> Experience:
    """Questions and answers as an Experience; the mask is the answer."""
    pairs = []
    for i in range(BATCH):
        pairs += teach(tokenizer, seed, step * BATCH + i)
    return packing.supervised(pairs)


def build(out: Path, name: str, *, seed: int = 0) -> None:
    """Build, warm up and save model and tokenizer for the task or environment in `name`.

    The training loop is pure: torch.func.grad over the bound model.
    """
    # A new model for the alphabet of the tasks.
    teach, texts, steps = _teaching(*parse(name))
    tokenizer = new_tokenizer(texts)
    lm = new_model(len(tokenizer), seed)
    apply, params = bind(lm, sampling=Sampling())
    tx = optim.adamw(optim.warmup_cosine(LR, steps // 2, steps))
    opt = tx.init(params)

    def total(p: Any, pack: Any) -> torch.Tensor:
        return (pack.w * loss.nll(apply(p, pack).logp)).sum()

    # A few steps of supervised fine-tuning on questions and their answers.
    for step in range(steps):
        exp = _batch(teach, tokenizer, rng.fold_in(seed, "warm-up"), step)
        pack = packing.pack(exp, range(len(exp.tokens)))
        updates, opt = tx.update(torch.func.grad(total)(params, pack), opt, params)
        optim.apply_updates(params, updates)
    save(out, lm, tokenizer)
