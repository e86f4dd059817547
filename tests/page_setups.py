"""The values that a page's code takes for granted, set up before a block."""

IMPORTS = "import torch\n\nimport rft_fn as rft\n"
STATE = """
torch.manual_seed(0)
st = rft.strategy.get_strategy()
tx = rft.optim.adamw(1e-3)
tokenizer = rft.model.load_tokenizer("tiny")
apply, state = st.init(rft.model.load("tiny"), tx)
params, budget = state.params, 512
"""
ROLLOUT = """
engine = rft.engine.get_engine(None, "tiny", tokenizer)
dataset = rft.data.load("sort_digits:1", tokenizer, template="{short}")
prompts, keys = rft.data.draw(dataset, 2, 0, 0)
sampling = rft.Sampling(max_new=4)
rollout = rft.collect.gather_and_generate(engine, st, prompts, keys, n=16, sampling=sampling)
mask = rollout.mask
adv = torch.linspace(-1, 1, len(mask))[:, None]
exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(mask))
"""
LISTS = """
from rft_fn import loss, metric, packing, segment, tree, weight

rows, sizes, rank = [[5, 8, 3], [7, 3, 12], [17, 4], [9, 4]], [2, 2], torch.tensor([0.0, 1.0, 0.0, 1.0])
apply, state = st.init(rft.model.load_reward("tiny", new=True), tx)
"""
TOKENS = """
score = rft.reward.weighted(correct=(rft.reward.task("sort_digits"), 1.0))
judged = rft.collect.gather_and_judge(st, score, rollout, prompts, tokenizer)
run, step = rft.run.Run("run", {}, total=1), 0


def loss_fn(out, b):
    return rft.loss.ppo_clip(out.logp, b.old_logp, b.adv)
"""
OWN_PAIRS = """
import json
from pathlib import Path

Path("runs").mkdir()
rows = [{"prompt": "sort:31=", "response": text} for text in ("13", "31", "")]
Path("runs/own.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""
SEVERAL = "from rft_fn.environment import Environment\n\nenv = Environment('words', None, None)\n"

BEFORE = {
    ("docs/actors.md", 0): IMPORTS + STATE,
    ("docs/algorithms.md", 0): IMPORTS
    + STATE
    + ROLLOUT
    + "old_logp = st.score(apply, params, rollout, budget).logp\nentropy = -old_logp\n",
    ("docs/algorithms.md", 1): LISTS,
    ("docs/algorithms.md", 2): "apply, params = rft.model.bind(rft.model.load('tiny'))\n"
    + "exp = rft.experience(rollout, adv=adv, w=rft.weight.token_mean(mask))\n",
    ("docs/environments.md", 0): IMPORTS + "tokenizer = rft.model.load_tokenizer('tiny')\n" + SEVERAL,
    ("docs/preferences.md", 0): IMPORTS,
    ("docs/preferences.md", 1): OWN_PAIRS,
    ("docs/commands.md", 1): IMPORTS + STATE.replace(", tx)", ", tx, entropy=True)") + ROLLOUT + TOKENS,
    (
        "docs/reward_models.md",
        2,
    ): "import torch\n\nscores = torch.randn(3, 2)\n",  # of a model that is trained
    ("docs/scaling.md", 0): IMPORTS
    + STATE.replace("get_strategy()", "get_strategy(rft.strategy.StrategyConfig(offload_models=True))")
    + ROLLOUT
    + "packs = st.shard(exp, budget)\n",
    ("kernels/README.md", 0): "import torch\n\n"
    "h, w, y = torch.randn(7, 8), torch.randn(11, 8), torch.randint(11, (7,))\n",
}
# what the code of a page has to leave behind
AFTER = {
    "docs/scripts.md": "from pathlib import Path\n\n"
    "assert state.step == 1 and Path('runs/mine/metrics.jsonl').exists()\n",
    "docs/reward_models.md": "import json\nfrom pathlib import Path\n\n"
    "rows = [json.loads(line) for line in Path('judge.jsonl').read_text().splitlines()]\n"
    "assert [row['verdict'] for row in rows] == ['score=1', 'score=0']\n",
}
# what a page names and a test cannot have: weights of the hub
SWAPS = {"docs/actors.md": {"Qwen/Qwen2-VL-2B-Instruct": "tiny-vl"}}


def whole(page, blocks):
    """One script of a page's blocks, each behind its setup."""
    parts = []
    for number, block in enumerate(blocks):
        parts += [BEFORE.get((page, number), ""), block]
    text = "\n".join([*parts, AFTER.get(page, "")])
    for old, new in SWAPS.get(page, {}).items():
        text = text.replace(old, new)
    return text
