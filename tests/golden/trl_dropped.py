"""Trainers that the newest trl no longer has: GSPO-token, DPPO and PPO of trl 1.5.1."""

from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import torch
import trl
from golden import batch, trl_drive
from golden.trl_drive import config, group_trainer, result, tensor, trainer


def entries() -> dict:
    from trl.experimental.dppo import DPPOConfig, DPPOTrainer
    from trl.experimental.gspo_token import GRPOTrainer

    level = {"importance_sampling_level": "sequence_token", "epsilon": 0.1, "epsilon_high": 0.12}
    token = partial(group, GRPOTrainer, trl.GRPOConfig, **level)
    dppo = partial(group, DPPOTrainer, DPPOConfig)
    return {
        "gspo_token/grpo": partial(token, loss_type="grpo"),
        "gspo_token/dapo": partial(token, loss_type="dapo"),
        "dppo/binary_tv": partial(dppo, divergence_type="binary_tv"),
        "dppo/binary_kl": partial(dppo, divergence_type="binary_kl", epsilon=0.02, epsilon_high=0.02),
        "ppo/loss": ppo,
    }


def group(cls, config_cls, **options):
    """A loss of the GRPO family on inputs put together here, which holds for every version."""
    args = config(config_cls, per_device_train_batch_size=batch.B, num_generations=batch.G, **options)
    logp, ids = (
        tensor("logp").requires_grad_(),
        torch.full_like(trl_drive.MASK, trl_drive.WORD, dtype=torch.long),
    )
    out = group_trainer(cls, args, None, [])
    out._get_per_token_logps_and_entropies = lambda *_, **__: (logp, tensor("entropy"))
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": trl_drive.MASK[:, :1].long(), "completion_ids": ids}
    inputs |= {
        "completion_mask": trl_drive.MASK.long(),
        "num_items_in_batch": trl_drive.MASK.sum(),
        "advantages": tensor("adv"),
    }
    inputs |= {"old_per_token_logps": tensor("old_logp"), "sampling_per_token_logps": tensor("old_logp")}
    return result(out._compute_loss(None, inputs), {"logp": logp}, [cls._compute_loss])


class Backward(Exception):
    """The first loss is what is wanted; nothing after it is run."""


def after_the_last(tokens, after):
    """[B, S]: PPOTrainer reads a value also one position after the last token, where there is one."""
    at = torch.arange(batch.S) == tensor("length").unsqueeze(1)
    return tokens * trl_drive.MASK + after.unsqueeze(1) * at


def ppo():
    """PPOTrainer.train() up to its first backward: rewards, GAE, whitening, both losses."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer
    from trl.experimental.ppo import ppo_trainer as module

    leaves = {k: tensor(k).requires_grad_() for k in ("logp", "value", "value_after")}
    value = after_the_last(leaves["value"], leaves["value_after"])
    old_value = after_the_last(tensor("old_value"), tensor("old_value_after"))
    rows = lambda x: torch.cat([x, x[:, -1:]], 1).unsqueeze(-1)  # noqa: E731  [B, prompt + S, 1]
    nothing = torch.zeros(batch.B, batch.S + 1, 1)
    response = torch.where(trl_drive.MASK, trl_drive.WORD, trl_drive.PAD)
    answer = torch.cat([torch.full((batch.B, 1), trl_drive.WORD), response], 1)
    model = SimpleNamespace(policy=None, value_model="value", train=lambda: None)
    output = SimpleNamespace(logits=nothing)
    scored = iter([tensor("old_logp"), tensor("ref_logp"), leaves["logp"]])  # in the order that train() asks

    @contextmanager
    def unwrap(*_, **__):
        yield model

    stubs = {
        "unwrap_model_for_generation": unwrap,
        "batch_generation": lambda *_: (answer, nothing[:, 1:]),
        "forward": lambda m, *_: (output, rows(value)) if m is model else output,
        "selective_log_softmax": lambda *_: next(scored),
        "get_reward": lambda m, *_: (rows(old_value), tensor("score"), None),
        "empty_cache": lambda: None,
        "np": SimpleNamespace(random=SimpleNamespace(permutation=torch.arange)),  # rows in order
    }
    module.__dict__.update(stubs)
    args = config(PPOConfig, per_device_train_batch_size=batch.B, num_ppo_epochs=1, num_mini_batches=1)
    args.num_total_batches = 1
    args.batch_size = args.local_batch_size = args.local_mini_batch_size = args.total_episodes = batch.B
    args.local_rollout_forward_batch_size = batch.B
    losses = []

    def backward(loss):
        losses.append(loss)
        raise Backward

    out = trainer(PPOTrainer, args, model=model, reward_model="reward", stop_token_id=None)
    names = {"optimizer": None, "dataloader": [{"input_ids": answer[:, :1]}], "train_dataset_len": batch.B}
    names |= {"state": SimpleNamespace(), "control": None, "is_deepspeed_enabled": False}
    names |= {"callback_handler": SimpleNamespace(on_train_begin=lambda *_: None)}
    names |= {"processing_class": SimpleNamespace(pad_token_id=trl_drive.PAD, eos_token_id=trl_drive.END)}
    out.__dict__.update(names)
    out.accelerator.backward, out.accelerator.print = backward, lambda *_: None
    out.accelerator.accumulate = lambda _: nullcontext()
    try:
        out.train()
    except Backward:
        return result(losses[0], leaves, [PPOTrainer.train])
    raise AssertionError("train() made no backward")
