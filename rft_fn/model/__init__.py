"""The model as a function: load, bind and score it; critics and reward models.

`load`, `lora` and `materialize` make modules; `frozen`, `dropout` and `layers` change them in place. `bind`
puts them inside a forward that takes packs (`reader`), `critic` and `reward_heads` under other heads.
`packing_probe` measures how packs run in it; `parts` finds the text model, towers and head. `save`,
`lora_folders` and `head_folders` write folders.
"""

from rft_fn.model.assigned import assign
from rft_fn.model.bind import Scorer, attach_teacher, bind, revealed, score, wrap_for_training
from rft_fn.model.critic import Critic, explained_variance, values
from rft_fn.model.frozen import freeze
from rft_fn.model.head_folders import load_critic, load_reward, save_critic, save_reward
from rft_fn.model.head_scale import Head, calibrated, final_scores, standardized, tempered
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
from rft_fn.model.reward_heads import RewardModel
from rft_fn.model.save import save
from rft_fn.model.teacher import Teacher, TeacherHead

__all__ = [
    "ActorAL", "ActorLanguage", "ActorOmni", "ActorVL", "Critic", "Head", "RewardModel", "Teacher",
    "TeacherHead", "apply_lora_configuration", "assign", "attach_teacher", "bind", "calibrated",
    "explained_variance", "final_scores", "freeze", "load", "load_critic", "load_processor", "load_reward",
    "load_tokenizer", "read_window", "revealed", "save", "save_critic", "save_reward", "score",
    "standardized", "tempered", "values",
]  # fmt: skip
