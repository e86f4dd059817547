"""The built-in tiny models: a character-level decoder of 0.33 M parameters, and how all are warmed up.

A few steps of supervised fine-tuning on the examples of a task or an environment warm them up: enough for the
form of an answer, while the content is right little more often than by chance. The rest is left to
reinforcement learning. Models with media learn more before: to look, or to listen.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rft_fn import environment, loss, optim, packing, rng, tree
from rft_fn.data import MediaLimits, Processing, from_task
from rft_fn.data.tasks import ALPHABET, TASKS, get_task
from rft_fn.environment import tiny_media_models
from rft_fn.environment.tiny_media_models import AUDIO, VISION
from rft_fn.model.bind import bind
from rft_fn.model.save import save
from rft_fn.types import Experience, Media, Sampling

__all__ = ["build", "cache_name", "new_model", "new_tokenizer"]


SIZE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
STEPS = 20
BATCH = 64
POOL = 2048  # problems with media of a warm-up: they are processed once, and come again
LR = 3e-3
WINDOW = 128
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'tool' %}={% endif %}{% endfor %}"
)


FORMS = {"tiny-vl": VISION, "tiny-audio": AUDIO}
Pair = tuple[list[int], list[int]]  # the tokens before a response, and the tokens of the response


def new_tokenizer(texts: Sequence[str] = ()) -> Any:
    """Return a tokenizer of one token per character of the tasks' alphabet, and one for each of `texts`.

    It has pad, end and unknown tokens besides. Its chat template is the bare question; what a tool says ends
    with "=", as questions do.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate(["<pad>", "<end>", "<unk>", *ALPHABET])}
    core: Any = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=TEMPLATE,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
    )
    tokenizer.add_tokens(list(texts))
    return tokenizer


def new_model(vocab: int, seed: int) -> Any:
    """Return a Llama of SIZE with weights drawn from `seed`, without touching torch's global generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        **SIZE,
        vocab_size=vocab,
        num_key_value_heads=SIZE["num_attention_heads"],
        max_position_embeddings=WINDOW,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def parse(name: str) -> tuple[str, int]:
    """Return (task or environment, level) of "tiny:TASK:LEVEL"; "tiny" is sort_digits at level 1.

    "tiny-vl" is count_squares and "tiny-audio" is tone, at level 1.
    """
    form, *parts = name.split(":")
    defaults = [FORMS[form].task if form in FORMS else "sort_digits", "1"]
    parts += defaults[len(parts) :]
    if len(parts) != 2 or not parts[1].isdigit():
        raise ValueError(f"model: expected {form}, {form}:TASK or {form}:TASK:LEVEL, got {name!r}")
    return parts[0], int(parts[1])


def cache_name(name: str) -> str:
    """Return a folder name that changes when anything does that the weights depend on."""
    form = name.split(":")[0]
    _, texts, steps = (None, (), STEPS) if form in FORMS else _teaching(*parse(name))
    text = repr((parse(name), steps, texts, torch.__version__))
    text += "".join(Path(file).read_text() for file in (__file__, tiny_media_models.__file__))
    return f"{form}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def build(out: Path, name: str, *, seed: int = 0) -> None:
    """Build, warm up and save model and tokenizer for the task or environment in `name`."""
    if name.split(":")[0] in FORMS:
        _build_with_media(out, name, seed)
        return
    teach, texts, steps = _teaching(*parse(name))
    tokenizer = new_tokenizer(texts)
    lm = new_model(len(tokenizer), seed)

    def batch(seed: int, step: int) -> Experience:
        pairs: list[Pair] = []
        for i in range(BATCH):
            pairs += teach(tokenizer, seed, step * BATCH + i)
        return packing.supervised(pairs)

    _warm_up(lm, batch, steps=steps, seed=seed)
    save(out, lm, tokenizer)


def _teaching(task: str, level: int) -> tuple[Callable[[Any, int, int], list[Pair]], tuple[str, ...], int]:
    """Return (what makes the pairs of a problem, texts of one token, steps) for a task or environment.

    Pairs are made of (tokenizer, seed, index of the problem).
    """
    if task in environment.ENVIRONMENTS and task not in TASKS:
        env = environment.get_environment(f"{task}:{level}")

        def play(tokenizer: Any, seed: int, index: int) -> list[Pair]:
            return environment.lessons(env, environment.Renderer(tokenizer), seed, index)

        return play, env.tokens, env.warm_up

    generate = get_task(task).generate

    def answer(tokenizer: Any, seed: int, index: int) -> list[Pair]:
        row = generate(seed, index, level)
        return [(tokenizer.encode(row["short"]), [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id])]

    return answer, (), STEPS


def _build_with_media(out: Path, name: str, seed: int) -> None:
    """Build, warm up and save a tiny model that sees or hears, with its processor."""
    # The alphabet of the tasks, the placeholders, and the tokens around them.
    form = FORMS[name.split(":")[0]]
    tokenizer = new_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(form.tokens)})
    tokenizer.chat_template = form.template
    processor = form.new_processor(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = form.new_model(tokenizer)

    # Prompts with media, as scripts draw them.
    task, level = parse(name)
    prompts = from_task(
        task,
        tokenizer,
        level=level,
        seed=rng.fold_in(seed, "warm-up"),
        processing=Processing(processor, MediaLimits()),
        template="{short}",
        max_prompt=WINDOW * 2,
    )

    def batch(seed: int, step: int) -> Experience:
        drawn = [prompts.prompt((step * BATCH + i) % POOL) for i in range(BATCH)]
        pairs = [(p.ids, [*tokenizer.encode(p.columns["answer"]), tokenizer.eos_token_id]) for p in drawn]
        return tree.replace(packing.supervised(pairs), media=Media.of_prompts([p.media for p in drawn]))

    _warm_up(lm, batch, steps=form.steps, seed=seed)
    save(out, lm, processor)


def _warm_up(lm: Any, batch: Callable[[int, int], Experience], *, steps: int, seed: int) -> None:
    """Fine-tune a model for a few steps on batch(seed, step), supervised.

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
