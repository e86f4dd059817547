"""Answers to names that other systems have: where the same thing is here."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

__all__ = ["CONFIG", "ROOT", "STRATEGY", "answers", "unknown"]

STRATEGY = {
    "all_gather": "Strategy.gather puts the rows of all ranks side by side",
    "backward": "gradients enter in one place: grads, metrics = st.grad(state, apply, loss_fn, packs)",
    "create_optimizer": "rft_fn.optim.adamw is a value that Strategy.init takes",
    "engine": "rft_fn.engine.get_engine builds one; a strategy has none",
    "gather_and_generate": "rft_fn.collect.gather_and_generate(eng, st, prompts, keys, n=..., sampling=...)",
    "get_rank": "Strategy.rank",
    "inference_engine": "rft_fn.collect.setup_inference_engine returns it; a strategy has none",
    "inference_engine_status": "rft_fn.collect.inference_engine_status(eng)",
    "is_rank_0": "Strategy.rank == 0",
    "load_ckpt": "Strategy.restore",
    "load_model": "rft_fn.model.load",
    "maybe_load_optimizer": "Strategy.reload",
    "maybe_offload_optimizer": "Strategy.offload",
    "maybe_sleep_inference_engine": "rft_fn.collect.sleep_inference_engine(eng)",
    "moving_average": "rft_fn.optim.ema, in the chain of transforms",
    "optimizer_step": "state, metrics = st.update(state, grads), which consumes both",
    "prepare": "apply, state = st.init(module, tx)",
    "prepare_model": "Strategy.init for what is trained, Strategy.bind for what is not",
    "prepare_models_and_optimizers": "Strategy.init, once for each model with its transform",
    "prepare_reward_model": "Strategy.bind; Strategy.place moves its weights",
    "process_sequences": "an engine's rollout has its mask, and tokens as they were sampled",
    "save_ckpt": "Strategy.save, and Strategy.rotate for those that may go",
    "save_model": "Strategy.save_pretrained",
    "set_seed": "keys are numbers: rft_fn.rng.fold_in(seed, step, prompt, sample)",
    "setup_dataloader": "rft_fn.data.draw: prompts are a function of the step",
    "setup_distributed": "rft_fn.strategy.get_strategy does it",
    "setup_inference_engine": "rft_fn.collect.setup_inference_engine",
    "unwrap_model": "nothing is wrapped: Strategy.export and Strategy.save_pretrained give whole weights",
    "update_engine_weights": "eng.load(st.export(state), version=state.step)",
    "wakeup_inference_engine": "rft_fn.collect.wakeup_inference_engine(eng)",
    "world_size": "Strategy.world",
}

_SCRIPT = "an option of the scripts, since it is not about processes: "

CONFIG = {
    "accumulated_gradient": "a step's gradient is that of all its packs: nothing is accumulated by hand",
    "actor_learning_rate": _SCRIPT + "--lr",
    "advantage_estimator": _SCRIPT + "--algorithm",
    "critic_learning_rate": _SCRIPT + "--critic-lr",
    "eps_clip": _SCRIPT + "--clip-low and --clip-high",
    "extra_args": "StrategyConfig.extra, or get_extra_arg(name, default)",
    "gradient_checkpointing": _SCRIPT + "--gradient-checkpointing",
    "init_kl_coef": _SCRIPT + "--kl or --kl-in-reward",
    "kl_estimator": "rft_fn.loss.kl_k1, kl_k2, kl_k3 and kl",
    "local_rank": "Strategy.rank, of a strategy that exists",
    "loss_agg_mode": "rft_fn.weight.token_mean and its neighbours: averages are weights of tokens",
    "max_epochs": _SCRIPT + "--epochs",
    "micro_rollout_batch_size": "StrategyConfig.engine_batch",
    "n_samples_per_prompt": _SCRIPT + "--group",
    "rollout_batch_size": _SCRIPT + "--prompts",
    "temperature": "rft_fn.Sampling, which engine and trainer share",
    "top_p": "rft_fn.Sampling, which engine and trainer share",
    "use_gspo": _SCRIPT + "--algorithm gspo",
    "use_tensorboard": _SCRIPT + "--trackers tensorboard",
    "use_wandb": _SCRIPT + "--trackers wandb",
}

_TRAINER = "there is no trainer: train_scripts/{} is the loop, to be copied and changed"

ROOT = {
    "ActorLanguage": "rft_fn.model.ActorLanguage",
    "DPOTrainer": _TRAINER.format("dpo.py"),
    "DataProto": "rft_fn.Rollout and rft_fn.Experience have named fields",
    "Experience_maker": "rft_fn.experience, after rewards and advantages",
    "FastExperienceMaker": "rft_fn.experience, after rewards and advantages",
    "GRPOConfig": _TRAINER.format("grpo.py") + "; python -m rft_fn.migrate trl FILE reads its config",
    "GRPOTrainer": _TRAINER.format("grpo.py"),
    "GPTLMLoss": "rft_fn.loss.nll",
    "KTOTrainer": "there is no KTO; train_scripts/dpo.py has DPO, IPO and the like",
    "PPOTrainer": _TRAINER.format("ppo.py"),
    "PairWiseLoss": "rft_fn.loss.bradley_terry",
    "PolicyLoss": "rft_fn.loss.ppo_clip and its neighbours; rft_fn.algorithm.TABLE has them by name",
    "RewardTrainer": _TRAINER.format("train_rm.py"),
    "SFTTrainer": _TRAINER.format("sft.py"),
    "SPMDPPOTrainer": _TRAINER.format("ppo.py"),
    "SPMDPPOTrainerVL": _TRAINER.format("ppo.py"),
    "StrategyConfig": "rft_fn.strategy.StrategyConfig",
    "ValueLoss": "rft_fn.loss.value_clip",
    "get_strategy": "rft_fn.strategy.get_strategy",
    "log_probs_from_logits": "rft_fn.logprob.log_probs_from_logits",
    "reset_position_ids": "rft_fn.packing.reset_position_ids",
}


def unknown(owner: str, hints: Mapping[str, str], name: str) -> NoReturn:
    """AttributeError for a name that `owner` does not have, with a hint where another system has it."""
    text = f"{owner} has no attribute {name!r}"
    if name in hints:
        text += f"; {hints[name]}"
    raise AttributeError(text)


def answers(owner: str, hints: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`, which answers with `unknown`."""

    def missing(name: str) -> Any:
        unknown(owner, hints, name)

    return missing
