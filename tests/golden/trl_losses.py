"""Golden numbers: TRL's losses, gradients and advantages on a fixed batch, into trl.json. Numbers only.

    python -m golden.trl_losses            # what the newest trl has
    python -m golden.trl_losses dropped    # trainers that it no longer has, with trl 1.5.1

Entries of the other part stay in the file as they are.
"""

import datetime
import json
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
import trl
from golden import trl_drive
from golden.trl_drive import DATA, MASK, advantages, config, policy, result, tensor, trainer

FILE = Path(__file__).with_name("trl.json")
MODE = "vllm_importance_sampling_mode"
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.12}
NEAR = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "old": "near_logp"}
VLLM = {"use_vllm": True, "loss_type": "dapo"}


def grpo() -> dict:
    """GRPOTrainer: key -> options of GRPOConfig (and of `trl_drive.scored`)."""
    out = {
        "grpo": {"loss_type": "grpo"},
        "bnpo": {"loss_type": "bnpo"},
        "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 16},
        "dapo": {"loss_type": "dapo"},
        "dapo clip-higher": {"loss_type": "dapo", "epsilon_high": 0.28},
        "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
        "cispo eps 1.28": {"loss_type": "cispo", "epsilon_high": 1.28},
        "cispo eps 0.28": {"loss_type": "cispo", "epsilon_high": 0.28},
        "sapo": {"loss_type": "sapo"},
        "vespo": {"loss_type": "vespo"},
        "delta": {"loss_type": "dapo", "delta": 1.5},
        "delta below the clip": {"loss_type": "dapo", "epsilon_high": 0.28, "delta": 1.1},
        "gspo grpo": {"loss_type": "grpo", **SEQUENCE},
        "gspo dapo": {"loss_type": "dapo", **SEQUENCE},
        "gspo dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 16, **SEQUENCE},
        "gspo paper's clip": {"loss_type": "grpo", **NEAR},
        "gspo paper's clip, dapo": {"loss_type": "dapo", **NEAR},
        "luspo": {"loss_type": "luspo", **SEQUENCE},
        "luspo token": {"loss_type": "luspo"},
        "kl": {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": False},
        "kl corrected": {"loss_type": "grpo", "beta": 0.05},
        "kl corrected, sequence": {"loss_type": "grpo", "beta": 0.05, **SEQUENCE},
        "kl corrected, on-policy": {"loss_type": "grpo", "beta": 0.05, "old": "logp"},
        "entropy bonus": {"loss_type": "grpo", "entropy_coef": 0.01},
        "high entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.2},
        "off-policy mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.1},
        "truncated": {"loss_type": "grpo", "mask_truncated_completions": True},
        "truncated, dapo": {"loss_type": "dapo", "mask_truncated_completions": True},
        "is off": {**VLLM, "vllm_importance_sampling_correction": False},
        "is token_truncate": {**VLLM, MODE: "token_truncate"},
        "is token_mask": {**VLLM, MODE: "token_mask"},
        "is band": {
            **VLLM, MODE: "token_mask", "vllm_importance_sampling_clip_min": 0.5,
        },
        "is sequence_truncate": {**VLLM, MODE: "sequence_truncate"},
        "is sequence_mask": {**VLLM, MODE: "sequence_mask"},
        "is token_truncate, kl": {
            **VLLM, MODE: "token_truncate", "beta": 0.05, "use_bias_correction_kl": False,
        },
        "is, off-policy mask": {
            **VLLM, MODE: "token_truncate", "off_policy_mask_threshold": 0.1,
        },
        "is vespo": {"use_vllm": True, "loss_type": "vespo", MODE: "token_truncate"},
        "as it comes": {"end_to_end": True},
    }  # fmt: skip
    cut = ["grpo", "bnpo", "dr_grpo", "dapo", "sapo", "gspo grpo", "luspo", "entropy bonus", "high entropy"]
    for name in cut:
        out[f"{name}, 4 micro-batches"] = {**out[name], "micro": 4}
    call = partial(policy, trl.GRPOTrainer, trl.GRPOConfig, num_generations=4)
    return {f"grpo/{k}": partial(call, **v) for k, v in out.items()}


def estimators() -> dict:
    """Advantages, by the method that the trainers compute them in."""
    one, two = DATA["reward"][:1], DATA["reward"]
    rows = {
        "group": {"scale_rewards": "group", "rewards": one},
        "none": {"scale_rewards": "none", "rewards": one},
        "batch": {"scale_rewards": "batch", "rewards": one},
        "two rewards": {"reward_weights": [1.0, 0.5], "rewards": two},
        "normalize_then_sum": {
            "reward_weights": [1.0, 0.5], "rewards": two, "multi_objective_aggregation": "normalize_then_sum",
        },
    }  # fmt: skip
    call = partial(advantages, trl.GRPOTrainer, trl.GRPOConfig, num_generations=4)
    out = {f"advantage/{k}": partial(call, **v) for k, v in rows.items()}
    out["advantage/group, float32"] = partial(in_float32, partial(call, rewards=one))
    rloo = partial(advantages, trl.RLOOTrainer, trl.RLOOConfig, num_generations=4, rewards=one)
    out["advantage/rloo"] = partial(rloo, beta=0.0)
    out["advantage/rloo, kl"] = partial(rloo, beta=0.05)
    out["advantage/rloo, normalised"] = partial(rloo, beta=0.0, normalize_advantages=True)
    return out


def in_float32(call):
    torch.set_default_dtype(torch.float32)  # what everyone's run has
    out = call()
    torch.set_default_dtype(torch.float64)
    return out


def others() -> dict:
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    rloo = partial(policy, trl.RLOOTrainer, trl.RLOOConfig, num_generations=4, beta=0.0)
    gmpo = partial(policy, GMPOTrainer, GMPOConfig, num_generations=4)
    return {
        "rloo/loss": rloo,
        "rloo/loss, on-policy": partial(rloo, old="logp"),
        "gmpo/loss": gmpo,
        "gmpo/loss, narrow": partial(gmpo, epsilon=0.2, epsilon_high=0.3),
        "async_grpo/loss": partial(in_float32, async_grpo),
        "dpo/sigmoid": partial(preference, "sigmoid"),
        "dpo/sigmoid, label smoothing": partial(preference, "sigmoid", label_smoothing=0.1),
        "dpo/robust": partial(preference, "robust", label_smoothing=0.1),
        "dpo/ipo": partial(preference, "ipo"),
        "dpo/hinge": partial(preference, "hinge"),
        "dpo/exo_pair": partial(preference, "exo_pair", label_smoothing=1e-3),
        "dpo/nca_pair": partial(preference, "nca_pair"),
        "dpo/bco_pair": partial(preference, "bco_pair"),
        "dpo/sppo_hard": partial(preference, "sppo_hard"),
        "dpo/apo_zero": partial(preference, "apo_zero"),
        "dpo/apo_down": partial(preference, "apo_down"),
        "dpo/sigmoid_norm": partial(preference, "sigmoid_norm", beta=5.0),
        "dpo/ld_alpha": partial(preference, "sigmoid", ld_alpha=0.5),
        "dpo/rpo": partial(preference, "sigmoid", "sft"),
        "kto/kto": partial(unpaired, "kto", desirable_weight=1.5, undesirable_weight=0.5),
        "kto/apo_zero_unpaired": partial(unpaired, "apo_zero_unpaired"),
        "cpo/sigmoid": partial(without_reference, "sigmoid"),
        "cpo/sigmoid, label smoothing": partial(without_reference, "sigmoid", label_smoothing=0.1),
        "cpo/simpo": partial(without_reference, "simpo", beta=2.0, simpo_gamma=1.0),
        "orpo/odds": odds,
        "a2po/loss": optimal_advantage,
        "reward/loss": reward_model,
        "reward/margin": partial(reward_model, margin=tensor("margin")),
        "reward/centred": partial(reward_model, center_rewards_coefficient=0.01),
        "logits/logp": logits,
        "logits/logp, temperature": partial(logits, temperature=0.7),
        "logits/entropy": entropy,
        "distillation/reverse kl": reverse_kl,
        "distillation/forward kl": partial(jsd, beta=0),
        "distillation/jsd": partial(jsd, beta=0.5),
        "distillation/jsd 0.9, temperature": partial(jsd, beta=0.9, temperature=0.7),
    }


def async_grpo():
    """AsyncGRPOTrainer on one packed row, in float32: its metrics mix the types of a float64 run."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    MASK = trl_drive.MASK
    tensor = lambda name: trl_drive.tensor(name).float()  # noqa: E731
    logp = tensor("logp").requires_grad_()
    index = torch.arange(MASK.numel()).view_as(MASK).masked_fill(~MASK, -1).view(1, -1)
    flat = {k: tensor(k).view(1, -1) for k in ("old_logp", "entropy")}
    names = ("input_ids", "position_ids", "shift_labels", "attention_mask")
    inputs = {k: torch.ones_like(index) for k in names} | {"token_index": index}
    adv = tensor("adv").view(-1, 1).expand_as(MASK).reshape(1, -1)
    inputs |= {"old_log_probs": flat["old_logp"], "advantages": adv}
    inputs |= {"segment_id": torch.zeros_like(index), "global_n_tokens": MASK.sum().view(1)}
    inputs |= {"global_n_forward_tokens": MASK.sum().view(1), "mean_seq_len": torch.ones(1)}
    trees = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    inputs |= {k: -torch.ones_like(index) for k in trees}
    inputs["tree_max_seqlens"] = torch.ones(1, 2, dtype=torch.long)
    model = lambda **_: SimpleNamespace(log_probs=logp.view(1, -1), entropy=flat["entropy"])  # noqa: E731
    args = config(AsyncGRPOConfig)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    out = trainer(AsyncGRPOTrainer, args, epsilon_low=args.epsilon, epsilon_high=high, metrics={})
    out.current_gradient_accumulation_steps = 1
    counters = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
    out.__dict__.update({f"_step_{k}": 0.0 for k in counters})
    return result(out.compute_loss(model, inputs), {"logp": logp}, [AsyncGRPOTrainer.compute_loss])


def preference(*loss_types, **options):
    """DPOTrainer: the first half of the rows is chosen, row i against row i + half."""
    args = config(trl.DPOConfig, loss_type=list(loss_types), **options)
    logp = tensor("logp").requires_grad_()
    zero = torch.zeros_like(logp)
    said = lambda x: SimpleNamespace(log_probs=x * MASK, entropy=zero, mean_logits=zero, is_top1=MASK)  # noqa: E731
    model, ref_model = (lambda **_: said(logp)), (lambda **_: said(tensor("ref_logp")))
    names = {
        "loss_types": args.loss_type,
        "loss_weights": [1.0] * len(loss_types),
        "f_divergence_type": "reverse_kl",
    }
    names |= {"precompute_ref_logps": False, "use_weighting": False, "ref_model": ref_model}
    out = trainer(trl.DPOTrainer, args, **names)
    mask = torch.cat([torch.zeros(len(MASK), 1), MASK], 1).long()  # one token of prompt
    words = torch.full_like(mask, trl_drive.WORD)
    inputs = {"input_ids": words, "attention_mask": mask, "completion_mask": mask}
    total = out._compute_loss(model, inputs, False)
    return result(total, {"logp": logp}, [trl.DPOTrainer._compute_loss])


def unpaired(loss_type, **options):
    """KTOTrainer: the first half of the rows is desirable. The responses that its KL is of are the same rows
    under the sampler's and the old policy's log-probs."""
    args = config(trl.KTOConfig, loss_type=loss_type, **options)
    logp = tensor("logp").requires_grad_()
    zero = torch.zeros_like(logp)
    said = lambda x: SimpleNamespace(log_probs=x * MASK, entropy=zero, mean_logits=zero)  # noqa: E731
    model, ref_model = (lambda **_: said(logp)), (lambda **_: said(tensor("ref_logp")))
    names = {"precompute_ref_logps": False, "ref_model": ref_model, "calculate_KL": loss_type == "kto"}
    out = trainer(trl.KTOTrainer, args, **names)
    sums = lambda name: (tensor(name) * MASK).sum(-1)  # noqa: E731
    out._compute_kl_logps = lambda which, _: sums("old_logp" if which is ref_model else "sampler_logp")
    mask = torch.cat([torch.zeros(len(MASK), 1), MASK], 1).long()  # one token of prompt
    words = torch.full_like(mask, trl_drive.WORD)
    inputs = {"input_ids": words, "attention_mask": mask, "completion_mask": mask}
    inputs["label"] = torch.arange(len(MASK)) < len(MASK) // 2
    total = out._compute_loss(model, inputs, False)
    return result(total, {"logp": logp}, [trl.KTOTrainer._compute_loss])


def sides(logp, *, mean=False):
    """The log-probs of both halves, sums or means over tokens."""
    total = (logp * MASK).sum(-1)
    return (total / MASK.sum(-1) if mean else total).chunk(2)


def without_reference(loss_type, **options):
    """CPOTrainer's loss of pairs, without the likelihood that it adds."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    out = trainer(CPOTrainer, config(CPOConfig, loss_type=loss_type, **options))
    logp = tensor("logp").requires_grad_()
    total = out.cpo_loss(*sides(logp, mean=loss_type == "simpo"))[0].mean()
    return result(total, {"logp": logp}, [CPOTrainer.cpo_loss])


def odds():
    """ORPOTrainer's term of the odds, in float32 as it takes it."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    out = trainer(ORPOTrainer, config(ORPOConfig))
    logp = tensor("logp").requires_grad_()
    total = -out.odds_ratio_loss(*sides(logp, mean=True))[0].mean()
    return result(total, {"logp": logp}, [ORPOTrainer.odds_ratio_loss])


def optimal_advantage():
    """A2POTrainer's regression, on the rewards of each group and their V*, as it precomputes it."""
    from trl.experimental.a2po import A2POConfig, A2POTrainer

    args = config(A2POConfig)
    out, logp = trainer(A2POTrainer, args), tensor("logp").requires_grad_()
    rewards = torch.tensor(DATA["reward"][0])
    values = args.beta1 * (torch.logsumexp(rewards.view(-1, 4) / args.beta1, dim=1) - math.log(4))
    out._get_sequence_logps = lambda *_: (logp * MASK).sum(-1)
    inputs = {"input_ids": None, "attention_mask": None, "logits_to_keep": None}
    inputs |= {"ref_logps": (tensor("ref_logp") * MASK).sum(-1), "rewards": rewards}
    inputs["v_star"] = values.repeat_interleave(4)
    return result(out.compute_loss(None, inputs), {"logp": logp}, [A2POTrainer.compute_loss])


def reward_model(margin=None, **options):
    score = tensor("score").requires_grad_()
    out = trainer(trl.RewardTrainer, config(trl.RewardConfig, **options))
    inputs = {"attention_mask": MASK.long()} | ({} if margin is None else {"margin": margin})
    total = out.compute_loss(lambda **_: SimpleNamespace(logits=score.unsqueeze(-1)), inputs)
    return result(total, {"score": score}, [trl.RewardTrainer.compute_loss])


def logits(**options):
    from trl.trainer.utils import selective_log_softmax as f

    x = tensor("logits").requires_grad_()
    value = f(x.unsqueeze(0), tensor("target").unsqueeze(0), **options).squeeze(0)
    return {**result(value.sum(), {"logits": x}, [f]), "value": value.tolist()}


def entropy():
    from trl.trainer.utils import entropy_from_logits as f

    x = tensor("logits").requires_grad_()
    value = f(x)
    return {**result(value.sum(), {"logits": x}, [f]), "value": value.tolist()}


def reverse_kl():
    from trl.experimental.gkd import GKDTrainer

    x, f = tensor("logits").requires_grad_(), GKDTrainer.generalized_jsd_loss
    total = f(x.unsqueeze(0), tensor("teacher_logits").unsqueeze(0), tensor("target").unsqueeze(0), beta=1)
    return result(total, {"logits": x}, [f])


def jsd(beta, temperature=1.0):
    from trl.experimental.gkd import GKDTrainer

    x, f = tensor("logits").requires_grad_(), GKDTrainer.generalized_jsd_loss
    options = {"beta": beta, "temperature": temperature}
    total = f(x.unsqueeze(0), tensor("teacher_logits").unsqueeze(0), tensor("target").unsqueeze(0), **options)
    return result(total, {"logits": x}, [f])


def settings(call) -> dict:
    """The options of an entry, as they were given; tensors and rewards are in the inputs."""
    options = getattr(call, "keywords", {})
    return {k: v for k, v in options.items() if k not in ("margin", "rewards")}


def write(entries, part):
    """trl.json with the entries of this part made anew: one line each, sorted."""
    old = json.loads(FILE.read_text()) if FILE.exists() else {"entries": {}, "made": {}}
    assert old.get("inputs", DATA) == json.loads(json.dumps(DATA)), "batch.py has changed: remove trl.json"
    kept = {k: v for k, v in old["entries"].items() if v["part"] != part}
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    made = old["made"] | {part: {**versions, "date": datetime.date.today().isoformat()}}
    head = {"source": "https://github.com/huggingface/trl", "licence": "Apache-2.0", "made": made}
    head |= {"inputs": DATA}
    new = {k: {"part": part, "settings": settings(call), **call()} for k, call in entries.items()}
    entries = dict(sorted((kept | new).items()))
    lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
    rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
    FILE.write_text("{\n" + ",\n".join(lines) + ',\n "entries": {\n' + rows + "\n }\n}\n")
    print(f"{FILE.name}: {len(entries)} entries, {part} by trl {trl.__version__}")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    if sys.argv[1:] == ["dropped"]:
        from golden import trl_dropped

        write(trl_dropped.entries(), "dropped")
    else:
        write({**grpo(), **estimators(), **others()}, "current")
