"""Python's names in other libraries: where the same thing is here."""

import re
from collections.abc import Mapping
from typing import NoReturn

from rft_fn.migrate import LIBRARIES

__all__ = ["CONFIG", "ROOT", "STRATEGY", "unknown"]

STRATEGY = {
    "all_gather": "Strategy.gather puts the rows of all ranks side by side",
    "args": "Strategy.config is the StrategyConfig; other options are those of the script's Config",
    "backward": "gradients enter in one place: grads, metrics = st.grad(state, apply, loss_fn, packs)",
    "create_optimizer": "rft_fn.optim.adamw is a value that Strategy.init takes",
    "engine": "rft_fn.engine.get_engine builds one; a strategy has none",
    "gather_and_generate": "rft_fn.collect.gather_and_generate(eng, st, prompts, keys, n=..., sampling=...)",
    "get_rank": "Strategy.rank",
    "gradient_checkpointing_enable": "the option --gradient-checkpointing of the scripts, for Strategy.init",
    "inference_engine": "rft_fn.collect.setup_inference_engine returns it; a strategy has none",
    "inference_engine_status": "rft_fn.collect.inference_engine_status(eng)",
    "init_model_context": "rft_fn.model.load; where weights are sharded, models are made on the meta device",
    "is_rank_0": "Strategy.rank == 0",
    "load_ckpt": "Strategy.restore",
    "load_model": "rft_fn.model.load",
    "make_experience": "rft_fn.experience, after rewards and advantages",
    "maybe_load_optimizer": "Strategy.reload",
    "maybe_offload_optimizer": "Strategy.offload",
    "maybe_sleep_inference_engine": "rft_fn.collect.sleep_inference_engine(eng)",
    "moving_average": "rft_fn.optim.ema, in the chain of transforms",
    "offload_model": "Strategy.place moves the weights of a model; Strategy.offload its optimizer's state",
    "optimizer_step": "state, metrics = st.update(state, grads), which consumes both",
    "ppo_train": "a step of the loop in train_scripts/grpo.py: Strategy.grad, then Strategy.update",
    "prepare": "apply, state = st.init(module, tx)",
    "prepare_model": "Strategy.init for what is trained, Strategy.bind for what is not",
    "prepare_models_and_optimizers": "Strategy.init, once for each model with its transform",
    "prepare_reward_model": "Strategy.bind; Strategy.place moves its weights",
    "process_sequences": "an engine's rollout has its mask, and tokens as they were sampled",
    "reload_model": "Strategy.place moves the weights of a model; Strategy.reload its optimizer's state",
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

# options of LightRFT that lead to one of the scripts, and names that are no option there or another here
CONFIG = {
    **{
        name: _SCRIPT + flag[0]
        for name, row in LIBRARIES["lightrft"].trainers["rl"].rows.items()
        if (flag := re.search(r"--(?!strategy\.)[a-z][a-z0-9-]*", row.ours))
    },
    "accumulated_gradient": "a step's gradient is that of all its packs: nothing is accumulated by hand",
    "advantage_estimator": _SCRIPT + "--algorithm",
    "advantages_norm": _SCRIPT + "--whiten, of ppo.py",
    "ema_model": _SCRIPT + "--ema, the decay",
    "eps_clip": _SCRIPT + "--clip-low and --clip-high",
    "eps_clip_low_high": _SCRIPT + "--clip-low and --clip-high",
    "extra_args": "StrategyConfig.extra, or get_extra_arg(name, default)",
    "init_kl_coef": _SCRIPT + "--kl or --kl-in-reward",
    "initial_model": _SCRIPT + "--kl, whose reference is the initial model",
    "kl_estimator": "rft_fn.loss.kl_k1, kl_k2, kl_k3 and kl",
    "local_rank": "Strategy.rank, of a strategy that exists",
    "loss_agg_mode": "rft_fn.weight.token_mean and its neighbours: averages are weights of tokens",
    "micro_rollout_batch_size": "StrategyConfig.engine_batch",
    "temperature": "rft_fn.Sampling, which engine and trainer share",
    "top_p": "rft_fn.Sampling, which engine and trainer share",
    "use_cpg_loss": _SCRIPT + "--algorithm cpgd",
    "use_gspo": _SCRIPT + "--algorithm gspo",
    "use_kl_loss": _SCRIPT + "--kl in the loss, --kl-in-reward in the reward",
    "use_tensorboard": _SCRIPT + "--trackers tensorboard",
    "use_wandb": _SCRIPT + "--trackers wandb",
}

_TRAINER = "there is no trainer: train_scripts/{} is the loop, to be copied and changed"

ROOT = {
    "Actor": "rft_fn.model.load, or rft_fn.model.ActorLanguage",
    "ActorAL": "rft_fn.model.ActorAL",
    "ActorLanguage": "rft_fn.model.ActorLanguage",
    "ActorModality": "rft_fn.modality.ActorModality",
    "ActorText": "rft_fn.model.ActorLanguage",
    "ActorVL": "rft_fn.model.ActorVL",
    "AdaptiveKLController": "rft_fn.reward_shaping.adaptive_kl",
    "agg_loss": "rft_fn.weight.token_mean and its neighbours: averages are weights of tokens",
    "apply_lora_configuration": "rft_fn.model.apply_lora_configuration",
    "compute_approx_kl": "rft_fn.loss.kl_k1, rft_fn.loss.kl_k2 and rft_fn.loss.kl_k3",
    "compute_score": "a function fn(completions, **columns); rft_fn.reward.by_column routes rows to several",
    "core_algos": "rft_fn.advantage and rft_fn.loss; rft_fn.algorithm.TABLE has rows by name",
    "DataProto": "rft_fn.Rollout and rft_fn.Experience have named fields",
    "DeepspeedStrategy": "rft_fn.strategy.get_strategy of a StrategyConfig with zero_stage",
    "DPOConfig": _TRAINER.format("dpo.py") + "; python -m rft_fn.migrate trl FILE reads its config",
    "DPOLoss": "rft_fn.loss.dpo, and the others of rft_fn.loss.PREFERENCES",
    "DPOTrainer": _TRAINER.format("dpo.py"),
    "Experience_maker": "rft_fn.experience, after rewards and advantages",
    "FakeStrategy": "rft_fn.strategy.get_fake_strategy",
    "FastExperienceMaker": "rft_fn.experience, after rewards and advantages",
    "FixedKLController": "a number: the option --kl-in-reward of the scripts",
    "FSDPV2Strategy": "rft_fn.strategy.get_strategy; it is FSDP2 under torchrun, or with StrategyConfig.fsdp",
    "GenerativeRewardModelVL": "rft_fn.reward.generative, or --reward judge:FOLDER",
    "get_fake_strategy": "rft_fn.strategy.get_fake_strategy",
    "get_strategy": "rft_fn.strategy.get_strategy",
    "get_supported_parameters": "rft_fn.modality.get_supported_parameters",
    "get_tokenizer": "rft_fn.model.load_tokenizer",
    "GPTLMLoss": "rft_fn.loss.nll",
    "GRPOConfig": _TRAINER.format("grpo.py") + "; python -m rft_fn.migrate trl FILE reads its config",
    "GRPOTrainer": _TRAINER.format("grpo.py"),
    "HPSLoss": "rft_fn.loss.hps",
    "KTOConfig": _TRAINER.format("dpo.py") + " --unpaired --loss kto",
    "KTOTrainer": _TRAINER.format("dpo.py") + " --unpaired --loss kto",
    "log_probs_from_logits": "rft_fn.logprob.log_probs_from_logits",
    "LogExpLoss": "rft_fn.loss.log_exp",
    "LogSigmoidLoss": "rft_fn.loss.bradley_terry",
    "masked_mean": "rft_fn.segment.mean by sequence, or the weights of rft_fn.weight",
    "masked_whiten": "rft_fn.advantage.whiten",
    "MODALITY_PARAMETERS": "rft_fn.modality.MODALITY_PARAMETERS",
    "monkey_patch": "nothing is patched: transformers takes attention functions by name",
    "NaiveExperienceMaker": "rft_fn.experience, after rewards and advantages",
    "PairWiseLoss": "rft_fn.loss.bradley_terry",
    "PolicyLoss": "rft_fn.loss.ppo_clip and its neighbours; rft_fn.algorithm.TABLE has them by name",
    "PPOConfig": _TRAINER.format("ppo.py"),
    "PPOTrainer": _TRAINER.format("ppo.py"),
    "reset_position_ids": "rft_fn.packing.reset_position_ids",
    "RewardConfig": _TRAINER.format("train_rm.py") + "; python -m rft_fn.migrate trl FILE reads its config",
    "RewardTrainer": _TRAINER.format("train_rm.py"),
    "RLOOConfig": _TRAINER.format("grpo.py") + ", with --algorithm rloo",
    "RLOOTrainer": _TRAINER.format("grpo.py") + ", with --algorithm rloo",
    "ScalarRewardModelAL": "rft_fn.model.RewardModel: heads on any backbone",
    "ScalarRewardModelVL": "rft_fn.model.RewardModel: heads on any backbone",
    "SFTConfig": _TRAINER.format("sft.py") + "; python -m rft_fn.migrate trl FILE reads its config",
    "SFTLoss": "rft_fn.loss.nll",
    "SFTTrainer": _TRAINER.format("sft.py"),
    "SPMDPPOTrainer": _TRAINER.format("ppo.py"),
    "SPMDPPOTrainerBase": _TRAINER.format("grpo.py"),
    "SPMDPPOTrainerVL": _TRAINER.format("ppo.py"),
    "StrategyBase": "rft_fn.Strategy, a record of functions",
    "StrategyConfig": "rft_fn.strategy.StrategyConfig",
    "supports_parameter": "rft_fn.modality.get_supported_parameters; an unknown name is an error",
    "tokenize_fn": "rft_fn.data: rows to ids",
    "ValueLoss": "rft_fn.loss.value_clip",
}


def unknown(owner: str, hints: Mapping[str, str], name: str) -> NoReturn:
    """Raise AttributeError, with a hint for a name that another library has."""
    hint = f"; {hints[name]}" if name in hints else ""
    raise AttributeError(f"{owner} has no attribute {name!r}{hint}")
