"""How TRL's own code is driven: trainers without a model, on the fixed batch of batch.py.

Methods of TRL's trainers are called on objects that skip `__init__`, with a configuration made by TRL's own
config class. In the model's place stands a leaf tensor of log-probs, whose gradient is what is recorded.
Needs a separate environment that has trl (README.md beside this file).
"""

import dataclasses
import inspect
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import trl
from golden import batch

DATA = batch.make()
PAD, END, WORD = 0, 1, 2


def tensor(name: str) -> torch.Tensor:
    x = torch.tensor(DATA[name])
    return x.double() if x.is_floating_point() else x


MASK = tensor("mask")


def use(data: dict) -> None:
    """Drive TRL on another batch from here on."""
    global DATA, MASK
    DATA = data
    MASK = tensor("mask")


class Accelerator:
    """One process: every collective hands its tensor back."""

    device, num_processes, process_index, is_main_process = torch.device("cpu"), 1, 0, True
    sync_gradients = True
    gather = gather_for_metrics = unwrap_model = reduce = staticmethod(lambda x, **_: x)
    pad_across_processes = gather


def config(cls, **options):
    base = {"output_dir": tempfile.gettempdir(), "report_to": [], "bf16": False, "use_cpu": True}
    return cls(**base, **options)


def trainer(cls, args, **more):
    """An object of TRL's class without its `__init__`, with the attributes that its methods read."""
    names = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False, _modules={})
    names |= {"args": args, "model": model, "ref_model": object(), "accelerator": Accelerator()}
    names |= {"_metrics": defaultdict(lambda: defaultdict(list)), "_logs": defaultdict(list)}
    names |= {"_total_train_tokens": 0, "_tp_size": 1, "aux_loss_enabled": False}
    out = object.__new__(cls)
    out.__dict__.update(names | more)
    return out


# ---- group methods: rollout scored by the trainer, then its loss


def group_trainer(cls, args, forward, rewards):
    """A trainer of the GRPO family.

    `forward(model)` returns the outputs of its model: (logp, entropy), [B, S] or a micro-batch of it.
    """
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    functions = [lambda prompts, row=row, **_: row for row in rewards]
    weights = torch.ones(len(rewards)) if args.reward_weights is None else torch.tensor(args.reward_weights)
    names = {"epsilon_low": args.epsilon, "epsilon_high": high, "reward_weights": weights.float()}
    names |= {"reward_funcs": functions, "reward_func_names": [f"r{i}" for i in range(len(functions))]}
    names |= {"reward_processing_classes": functions, "environments": None, "environment_factories": None}
    names |= {"tools": None, "_is_vlm": False, "eos_token_ids": [END]}
    names |= {"state": SimpleNamespace(global_step=0)}
    names |= {"_tokenizer": SimpleNamespace(pad_token_id=PAD), "chat_template_kwargs": {}}
    names |= {"current_gradient_accumulation_steps": args.gradient_accumulation_steps}
    names |= {"_pending_extra_logs": defaultdict(list), "_pending_metrics": defaultdict(list)}
    names |= {"_entropy_bonus_enabled": bool(getattr(args, "entropy_coef", 0)), "use_adaptive_entropy": False}
    out = trainer(cls, args, **names)
    out._logs["rewards"] = defaultdict(list)
    out._get_per_token_logps_and_entropies = lambda model, *_, **__: (*forward(model), None)
    made = generate(args.use_vllm)
    short = issubclass(cls, trl.RLOOTrainer)  # ids, ids and text are all that it asks for
    out._generate = lambda _: (made[0], made[1], made[3]) if short else made
    return out


def generate(sampler):
    """The results of a trainer's `_generate`: ids, text, and with vLLM the sampler's log-probs."""
    ids = [[WORD] * (n - 1) + [WORD if cut else END] for n, cut in zip(DATA["length"], DATA["truncated"])]
    logp = [row[:n] for row, n in zip(DATA["sampler_logp"], DATA["length"])] if sampler else None
    return [[WORD]] * batch.B, ids, tool_mask(), ["x"] * batch.B, logp, {}, None, None


def tool_mask():
    """A trainer's mask of tools, beside that of completions: None where every token was sampled."""
    whole = [[t < n for t in range(batch.S)] for n in DATA["length"]]
    if DATA["mask"] == whole:
        return None
    return [[int(own) for own in row[:n]] for row, n in zip(DATA["mask"], DATA["length"])]


def scored(cls, config_cls, *, micro=1, old="old_logp", rewards=None, **options):
    """(trainer, its scored rollout, the leaves): the trainer's own `_generate_and_score_completions`."""
    rows = batch.B // micro
    args = config(config_cls, per_device_train_batch_size=rows, gradient_accumulation_steps=micro, **options)
    leaves = {"logp": tensor("logp").requires_grad_(), "entropy": tensor("entropy").requires_grad_()}
    at = SimpleNamespace(rows=slice(None))

    def forward(model):  # the trainer scores with its model and its reference; `policy` gives the loss None
        logp = leaves["logp"] if model is None else tensor(old if model is out.model else "ref_logp")
        return logp[at.rows], leaves["entropy"][at.rows]

    out = group_trainer(cls, args, forward, DATA["reward"][:1] if rewards is None else rewards)
    out.at = at
    return out, out._generate_and_score_completions([{"prompt": "q"} for _ in range(batch.B)]), leaves


def policy(cls, config_cls, *, micro=1, end_to_end=False, **options):
    """A step's loss and gradient: the loss of each micro-batch, added up. Two iterations, so that the trainer
    scores the old policy."""
    out, scores, leaves = scored(cls, config_cls, micro=micro, num_iterations=2, **options)
    if not end_to_end:
        scores["advantages"] = tensor("adv")
    total = torch.zeros(())
    for i in range(micro):
        out.at.rows = slice(i * batch.B // micro, (i + 1) * batch.B // micro)
        cut = {k: v[out.at.rows] if v.dim() else v for k, v in scores.items()}
        total = total + out._compute_loss(None, cut)
    return result(total, leaves, [cls._generate_and_score_completions, cls._compute_loss])


def advantages(cls, config_cls, *, rewards=None, **options):
    _, scores, _ = scored(cls, config_cls, rewards=rewards, **options)
    return {"value": scores["advantages"].tolist(), "called": where(cls._generate_and_score_completions)}


def result(total, leaves, called):
    """The loss, and its gradient in mask order; a gradient outside mask would be an error of the stub."""
    out = {"called": where(*called), "loss": total.item(), "grad": {}}
    for name, grad in zip(leaves, torch.autograd.grad(total, list(leaves.values()), allow_unused=True)):
        if grad is None or not grad.any():
            continue
        if grad.shape == MASK.shape:
            assert not grad[~MASK].any(), name
            grad = grad[MASK]
        out["grad"][name] = grad.flatten().tolist()
    return out


def where(*functions):
    """`file: name` of what was called, in the package's own paths."""
    root = Path(trl.__file__).parent.parent
    path = lambda f: Path(inspect.getsourcefile(inspect.unwrap(f))).relative_to(root)  # noqa: E731
    return [f"{path(f)}: {inspect.unwrap(f).__qualname__}" for f in functions]
