"""The type of a row in the tables, and the rows that several libraries share."""

from typing import NamedTuple

__all__ = [
    "ALGORITHM",
    "ANSWER",
    "CHAT",
    "CLIP",
    "COLUMN",
    "DATA_EPOCHS",
    "KL_IN_LOSS",
    "KL_IN_REWARD",
    "LOGGED",
    "LORA",
    "LR",
    "ORDER",
    "PROCESSES",
    "RESPONSES",
    "RESUMED",
    "REWARD_FILE",
    "REWARD_MODEL",
    "ROLLOUT_EPOCHS",
    "SHARES",
    "SPLIT",
    "TOGETHER",
    "WARMUP",
    "Row",
    "To",
]  # fmt: skip


class To(NamedTuple):
    """Our option of the same meaning."""

    option: str
    remark: str = ""  # where the unit or the meaning differs; a flag in it is one that the script has too
    needs: str = ""  # another option of the scripts in which it means this


# the options that it may mean: the first that a script has counts; or a text for an option that none has
Row = tuple[To, ...] | str

LR = (To("lr"),)
ROLLOUT_EPOCHS = (To("epochs", "passes over a rollout", needs="group"),)
DATA_EPOCHS = (To("data_epochs", "passes over the data"), To("epochs", needs="batch"))
KL_IN_REWARD = (To("kl_in_reward", "of whole responses"), To("kl", needs="kl_target"))
KL_IN_LOSS = (
    To("kl", "its coefficient; 0 is off", needs="kl_in_reward"),
    To("kl", "in the reward of each token, not in the loss", needs="kl_target"),
)
CLIP = (To("clip_low", "one side of the clip; --clip-high is the other"),)
ALGORITHM = (To("algorithm", "a row of rft_fn.algorithm.TABLE: advantage, loss and weight together"),)
WARMUP = (To("warmup", "counted in steps, not as a share"),)
SHARES = (To("data", "a share stands behind each source: a.jsonl=0.7 b.jsonl=0.3"),)
COLUMN = (To("template", "a column is named in braces: {question}"),)
SPLIT = (To("data", "a split is named behind the source: NAME@train"),)
REWARD_FILE = (To("reward", "given as FILE.py:FUNCTION"),)
REWARD_MODEL = (To("reward", "given as a function, FILE.py:FUNCTION, which may ask a model"),)
ANSWER = (To("reward", "a reward names the columns that it reads"),)
RESPONSES = (To("train_batch_size", "counted in responses"),)
LORA = (To("lora_rank", "0 trains all weights"),)
LOGGED = "every step is a row of metrics.jsonl in the folder of the run"
RESUMED = "the same command continues from the newest checkpoint of its folder"
CHAT = "the model's own chat template is always applied"
ORDER = "each pass over the data has another order, drawn from the seed"
PROCESSES = "the processes are those that torchrun starts"
TOGETHER = "trainer and engine share their processes"
