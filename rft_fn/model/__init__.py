"""The model as a function: load, bind and score it; critics and reward models.

`load`, `lora` and `materialize` make modules; `bind` and `heads` put them inside a forward that takes packs
(`reader`); `packing_probe` measures how packs run in it; `parts` finds the text model, towers and head.
"""

from rft_fn.model.bind import Scorer, attach_teacher, bind, revealed, score, wrap_for_training
from rft_fn.model.frozen import freeze
from rft_fn.model.head_folders import load_critic, load_reward, save_critic, save_reward
from rft_fn.model.heads import (
    Critic,
    Head,
    RewardModel,
    calibrated,
    explained_variance,
    final_scores,
    standardized,
    tempered,
    values,
)
from rft_fn.model.load import (
    ActorAL,
    ActorLanguage,
    ActorOmni,
    ActorVL,
    load,
    load_processor,
    load_tokenizer,
    read_window,
)
from rft_fn.model.lora import apply_lora_configuration, without_adapters
from rft_fn.model.materialize import materialize
from rft_fn.model.model_names import cache_dir, resolve
from rft_fn.model.parts import text_model
from rft_fn.model.quantize import check as check_quantize
from rft_fn.model.reader import split_over
from rft_fn.model.save import assign, save
from rft_fn.model.teacher import Teacher, TeacherHead

__all__ = [
    "ActorAL", "ActorLanguage", "ActorOmni", "ActorVL", "Critic", "Head", "RewardModel", "Teacher",
    "TeacherHead", "apply_lora_configuration", "assign", "attach_teacher", "bind", "calibrated",
    "explained_variance", "final_scores", "freeze", "load", "load_critic", "load_processor", "load_reward",
    "load_tokenizer", "read_window", "revealed", "save", "save_critic", "save_reward", "score",
    "standardized", "tempered", "values",
]  # fmt: skip
