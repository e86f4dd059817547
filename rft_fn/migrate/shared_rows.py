"""Rows and flags that several libraries share."""

from rft_fn.migrate.rows import Flag, Row, choice, nothing, several

__all__ = [
    "ALGORITHM",
    "ANSWER",
    "BUDGET",
    "CHOSEN_ATTENTION",
    "CLIP",
    "COLUMN",
    "COMPLETIONS",
    "DATA_EPOCHS",
    "DROPOUT",
    "EVAL_EVERY",
    "FUSED",
    "KL_IN_LOSS",
    "KL_IN_REWARD",
    "LOGGED",
    "NF4",
    "ORDER",
    "PROCESSES",
    "REFERENCE",
    "RESUMED",
    "REWARD_FILE",
    "REWARD_MODEL",
    "ROLLOUT_EPOCHS",
    "SAVE_EVERY",
    "SHARE_OF_RUN",
    "SPLIT",
    "TOGETHER",
    "TRACKERS",
    "UNEVALUATED",
    "UNTRUSTED",
    "WARMUP",
]


BUDGET = "--budget bounds the tokens of a pack; the gradient does not depend on it"
COMPLETIONS = "trajectories.jsonl in the folder of the run has prompts, responses and rewards"

REFERENCE = nothing("the reference is the initial model, which scores the pairs of each step")
UNEVALUATED = nothing("sft.py does not evaluate; evaluate.py scores answers")
UNTRUSTED = nothing("the scripts run no code of a model's folder")
CHOSEN_ATTENTION = nothing("the fastest attention that packs allow is chosen automatically")
FUSED = nothing("the fused head is on by default")
DROPOUT = nothing("a policy with dropout is not the one that sampled", "adapters are trained without dropout")
ORDER = nothing(
    "rows are always drawn in an order that the seed and the step decide",
    "each pass over the data has another order, drawn from the seed",
)
LOGGED = nothing("every step is logged", "every step is a row of metrics.jsonl in the folder of the run")
RESUMED = nothing(
    "run the same command again to resume",
    "the same command continues from the newest checkpoint of its folder",
)
TRACKERS = several(
    "--trackers",
    "others than wandb, tensorboard and trackio have none; files are always written",
    wandb="wandb",
    tensorboard="tensorboard",
    trackio="trackio",
    none="",
    console="",
    file="",
    hint=Flag("trackers"),
)
NF4 = choice(true="--quantize nf4", false="")
SAVE_EVERY = Row("--save-every {x}", values=dict.fromkeys(("-1", "0", "false"), "--save-every 1000000"))
EVAL_EVERY = Row("--eval-every {x}", values=dict.fromkeys(("-1", "0", "false"), "--eval-every 1000000"))

# hints of the command line
ROLLOUT_EPOCHS = Flag("epochs", "passes over a rollout", needs="group")
DATA_EPOCHS = (Flag("data_epochs", "passes over the data"), Flag("epochs", needs="batch"))
KL_IN_REWARD = (Flag("kl_in_reward", "of whole responses"), Flag("kl", needs="kl_target"))
KL_IN_LOSS = (
    Flag("kl", "its coefficient; 0 is off", needs="kl_in_reward"),
    Flag("kl", "in the reward of each token, not in the loss", needs="kl_target"),
)
CLIP = Flag("clip_low", "one side of the clip; --clip-high is the other")
ALGORITHM = Flag("algorithm", "a row of rft_fn.algorithm.TABLE: advantage, loss and weight together")
WARMUP = Flag("warmup", "steps, or below 1 a share of the run")
SHARE_OF_RUN = nothing("--warmup X, below 1 a share of the run", WARMUP)
COLUMN = Flag("template", "a column is named in braces: {question}")
SPLIT = Flag("data", "a split is named behind the source: NAME@train")
REWARD_FILE = Flag("reward", "given as FILE.py:FUNCTION")
REWARD_MODEL = Flag("reward", "given as a function, FILE.py:FUNCTION, which may ask a model")
ANSWER = Flag("reward", "a reward names the columns that it reads")
PROCESSES = "the processes are those that torchrun starts"
TOGETHER = "trainer and engine share their processes"
