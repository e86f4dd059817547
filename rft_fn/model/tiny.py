"""The built-in tiny models: a character-level decoder of 0.33 M parameters, and ones that see or hear.

A few steps of supervised fine-tuning on generated examples warm it up: enough for the form of an answer,
while the content is right little more often than by chance. The rest is left to reinforcement learning.
Those of `tiny_vl` and `tiny_audio` learn more before: to look, or to listen.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rft_fn import loss, optim, packing, rng, tree
from rft_fn.model import tiny_audio, tiny_vl
from rft_fn.model.bind import bind
from rft_fn.model.save import save
from rft_fn.types import Experience, Media, Sampling

__all__ = ["FORMS", "build", "cache_name", "new_model", "new_tokenizer"]

SIZE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
STEPS = 20
BATCH = 64
POOL = 2048  # problems with media of a warm-up: they are processed once, and come again
LR = 3e-3
WINDOW = 128
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'tool' %}={% endif %}{% endfor %}"
)
FORMS = {"tiny-vl": tiny_vl, "tiny-audio": tiny_audio}
"""The tiny models with media, by name: modules with their task, tokens, model and processor."""


def parse(name: str) -> tuple[str, int]:
    """(task or environment, level) of "tiny:TASK:LEVEL"; "tiny" is sort_digits at level 1.

    "tiny-vl" is count_squares and "tiny-audio" is tone, at level 1.
    """
    form, *parts = name.split(":")
    task = "sort_digits"
    if form in FORMS:
        task = FORMS[form].TASK
    defaults = [task, "1"]
    parts += defaults[len(parts) :]
    if len(parts) != 2 or not parts[1].isdigit():
        raise ValueError(f"model: expected {form}, {form}:TASK or {form}:TASK:LEVEL, got {name!r}")
    return parts[0], int(parts[1])


def cache_name(name: str) -> str:
    """A folder name that changes when anything does that the weights depend on."""
    form = name.split(":")[0]
    texts, steps = (), STEPS
    if form not in FORMS:
        _, texts, steps = _teaching(*parse(name))
    text = repr((parse(name), SIZE, steps, texts, BATCH, POOL, LR, WINDOW, TEMPLATE, torch.__version__))
    text += Path(__file__).read_text()
    if form in FORMS:
        text += Path(str(FORMS[form].__file__)).read_text()
    return f"{form}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


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


class _MakeBatch(Protocol):
    """Makes the examples of a step of the warm-up."""

    def __call__(self, seed: int, step: int, /) -> Experience:
        """Questions and answers; the mask is the answers."""
        ...


def build(out: Path, name: str, *, seed: int = 0) -> None:
    """Build, warm up and save model and tokenizer for the task or environment in `name`."""
    if name.split(":")[0] in FORMS:
        _build_with_media(out, name, seed)
        return

    # A new model for the alphabet of the tasks.
    teach, texts, steps = _teaching(*parse(name))
    tokenizer = new_tokenizer(texts)
    lm = new_model(len(tokenizer), seed)
    _warm_up(lm, lambda seed, step: _batch(teach, tokenizer, seed, step), steps=steps, seed=seed)
    save(out, lm, tokenizer)


def _build_with_media(out: Path, name: str, seed: int) -> None:
    """Build, warm up and save a tiny model that sees or hears, with its processor."""
    from rft_fn.data import MediaLimits, Processing, from_task

    # The alphabet of the tasks, and the tokens that stand around media and for them.
    form = FORMS[name.split(":")[0]]
    tokenizer = new_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(form.TOKENS)})
    tokenizer.chat_template = form.TEMPLATE
    processor = form.new_processor(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = form.new_model(tokenizer)

    # Prompts with media, as scripts draw them.
    task, level = parse(name)
    processing = Processing(processor, MediaLimits())
    start = rng.fold_in(seed, "warm-up")
    how = {"processing": processing, "template": "{short}", "max_prompt": WINDOW * 2}
    prompts = from_task(task, tokenizer, level=level, seed=start, **how)

    def batch(seed: int, step: int) -> Experience:
        found = [prompts.prompt((step * BATCH + i) % POOL) for i in range(BATCH)]
        pairs = [(p.ids, [*tokenizer.encode(p.columns["answer"]), tokenizer.eos_token_id]) for p in found]
        return tree.replace(packing.supervised(pairs), media=Media.of_prompts([p.media for p in found]))

    _warm_up(lm, batch, steps=form.STEPS, seed=seed)
    save(out, lm, processor)


def _warm_up(lm: Any, batch: _MakeBatch, *, steps: int, seed: int) -> None:
    """A few steps of supervised fine-tuning.

    The training loop is pure: torch.func.grad over the bound model.
    """
    apply, params = bind(lm, sampling=Sampling())
    tx = optim.adamw(optim.warmup_cosine(LR, steps // 2, steps))
    opt = tx.init(params)

    def total(p: Any, pack: Any) -> torch.Tensor:
        return (pack.w * loss.nll(apply(p, pack).logp)).sum()

    for step in range(steps):
        exp = batch(rng.fold_in(seed, "warm-up"), step)
        pack = packing.pack(exp, range(len(exp.tokens)))
        updates, opt = tx.update(torch.func.grad(total)(params, pack), opt, params)
        optim.apply_updates(params, updates)
