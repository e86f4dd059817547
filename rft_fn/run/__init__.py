"""The surroundings of a training loop: options, setup, the run folder, trackers, signals, errors."""

from typing import TYPE_CHECKING, Any

from rft_fn.run import options
from rft_fn.run.agent_episodes import check_agent, play_agents
from rft_fn.run.building import setup
from rft_fn.run.card import save_card
from rft_fn.run.cli import cli, error_line, guard, without
from rft_fn.run.distillation import Distillation, DistillationRun, load_taught_task, teacher_modules
from rft_fn.run.earlier_run import last_model, settings
from rft_fn.run.evaluation_result import Measured, answers_of, compared, show, summary
from rft_fn.run.lm_eval_tasks import check_tasks, harness_model, harness_tasks
from rft_fn.run.objective import (
    actor_critic,
    greedy_baseline,
    learning_rows,
    minibatches,
    next_kl,
    objective,
    shaping,
)
from rft_fn.run.off_policy import check_gap, trainer_logp, update_kl
from rft_fn.run.opening import (
    data_options,
    load_critic,
    load_data,
    load_processing,
    optimizer,
    updates_per_pass,
    updates_per_step,
    warmup_updates,
)
from rft_fn.run.progress import track
from rft_fn.run.result_files import check_results, table, write_results
from rft_fn.run.reward_model import (
    RewardModelRun,
    as_one_pack,
    calibrate,
    check_labelled,
    load_labelled,
    load_reward_model,
)
from rft_fn.run.reward_task import (
    Task,
    check_engine_media,
    draw_examples,
    load_rewards,
    load_task,
    normalized_reward,
    rewards_of,
)
from rft_fn.run.rollout_files import read_rollout
from rft_fn.run.run_folder import Run
from rft_fn.run.samples import response_row
from rft_fn.run.setup import Model, Reference, Setup
from rft_fn.run.signals import Stopped
from rft_fn.run.teachers import load_teachers
from rft_fn.run.tokens import TokenLog, token_log

if TYPE_CHECKING:
    from rft_fn.tools.serving import serve
    from rft_fn.tools.serving.model_server import ModelEndpoint, serve_model

__all__ = [
    "Distillation",
    "DistillationRun",
    "Measured",
    "Model",
    "ModelEndpoint",
    "Reference",
    "RewardModelRun",
    "Run",
    "Setup",
    "Task",
    "TokenLog",
    "actor_critic",
    "answers_of",
    "as_one_pack",
    "calibrate",
    "check_agent",
    "check_engine_media",
    "check_gap",
    "check_labelled",
    "check_results",
    "check_tasks",
    "cli",
    "compared",
    "data_options",
    "draw_examples",
    "greedy_baseline",
    "harness_model",
    "harness_tasks",
    "last_model",
    "learning_rows",
    "load_critic",
    "load_data",
    "load_labelled",
    "load_processing",
    "load_reward_model",
    "load_rewards",
    "load_task",
    "load_taught_task",
    "load_teachers",
    "minibatches",
    "next_kl",
    "normalized_reward",
    "objective",
    "optimizer",
    "options",
    "play_agents",
    "read_rollout",
    "response_row",
    "rewards_of",
    "save_card",
    "serve",
    "serve_model",
    "settings",
    "setup",
    "shaping",
    "show",
    "summary",
    "table",
    "teacher_modules",
    "token_log",
    "track",
    "trainer_logp",
    "update_kl",
    "updates_per_pass",
    "updates_per_step",
    "warmup_updates",
    "without",
    "write_results",
]  # fmt: skip


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a server, which is a tool and has its name here too."""
        if name == "serve":
            from rft_fn.tools.serving import serve

            return serve
        if name in ("ModelEndpoint", "serve_model"):
            from rft_fn.tools.serving import model_server

            return getattr(model_server, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
