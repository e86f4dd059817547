"""Settings of TRL and the calls of ours that equal them.

The tests check this list, and make_table.py prints it.

`ours` gives TRL's value and gradient. `paper` is the formula of the paper of that name, or the usual meaning
of the setting, where TRL's is something else: the table has the relation of the two gradients. A term is
(weight, loss): the weight sees [B, S] tensors, the loss the flat stream of them, and the total is the sum of
w times loss. A plain string is an expression by itself. They are source strings, so that what is printed is
what was run.
"""

from typing import NamedTuple

Terms = tuple[tuple[str, str], ...] | str


class Row(NamedTuple):
    """One setting."""

    key: str  # the entry of trl.json
    setting: str  # as a user of TRL writes it
    ours: Terms
    differs: str = ""  # from the paper, in words
    paper: Terms | None = None  # None: `ours` is the paper's, or there is none
    let: tuple[tuple[str, str], ...] = ()  # names for `ours`, one after the other, of [B, S] tensors
    tol: float = 1e-10  # relative, of value and gradient
    value: bool = True  # False: only the gradients are the same
    counts: bool = True  # a response without tokens counts in their means over responses


TOKEN, SEQ, SUM = "weight.token_mean(mask)", "weight.seq_mean(mask)", "weight.seq_sum(mask)"
FIXED = "weight.constant(mask, 16)"
CLIP = "loss.ppo_clip(logp, old_logp, adv)"
HIGHER = "loss.ppo_clip(logp, old_logp, adv, high=0.28)"
GSPO = "loss.gspo(logp, old_logp, adv, mask, seq, num_seqs, low=0.1, high=0.12)"
NEAR = "loss.gspo(logp, near_logp, adv, mask, seq, num_seqs)"
VESPO = "loss.vespo(logp, {}, adv, mask, seq, num_seqs)"
KL = "0.05 * loss.kl_k3(logp, ref_logp)"
BONUS = "0.01 * loss.entropy_bonus(entropy)"
HIGH = f"weight.high_entropy({TOKEN}, entropy, mask, share=0.2)"


POLICY = [
    Row(
        "grpo/as it comes", "`GRPOConfig()`", ((TOKEN, CLIP),),
        "the normaliser is DAPO's, not GRPO's, and beta is 0: no KL",
        ((SEQ, CLIP),),
        (("adv", "advantage.grpo(reward[0], eps=1e-4).view(-1, 1) * mask"),),
    ),
    Row("grpo/grpo", '`loss_type="grpo"`', ((SEQ, CLIP),)),
    Row(
        "grpo/bnpo", '`loss_type="bnpo"`, one micro-batch', ((TOKEN, CLIP),),
    ),
    Row("grpo/dr_grpo", '`loss_type="dr_grpo"`, `max_completion_length=16`', ((FIXED, CLIP),)),
    Row(
        "grpo/dapo", '`loss_type="dapo"` (the default)', ((TOKEN, CLIP),),
        "DAPO clips higher: `epsilon_high=0.28` has to be set", ((TOKEN, HIGHER),),
    ),
    Row("grpo/dapo clip-higher", '`loss_type="dapo"`, `epsilon_high=0.28`', ((TOKEN, HIGHER),)),
    Row(
        "async_grpo/loss", "`AsyncGRPOTrainer`", ((TOKEN, CLIP),),
        "the normaliser is DAPO's, not GRPO's (run in float32)", ((SEQ, CLIP),), tol=1e-6,
    ),
    Row(
        "grpo/delta", "`delta=1.5`", ((TOKEN, "loss.ppo_clip(logp, old_logp, adv, dual=1.5)"),),
    ),
    Row(
        "grpo/delta below the clip", "`delta=1.1`, `epsilon_high=0.28`",
        ((TOKEN, "-torch.where(adv > 0, loss.ratio(logp, old_logp).clamp(max=1.1), "
                 "loss.ratio(logp, old_logp).clamp(0.8, 1.28)) * adv"),),
        "below 1 + epsilon_high (TRL advises against it) delta is no dual clip: good tokens are clipped at "
        "delta, bad ones at 1 + epsilon_high",
        ((TOKEN, "loss.ppo_clip(logp, old_logp, adv, high=0.28, dual=1.1)"),),
    ),
    Row("grpo/gspo grpo", '`importance_sampling_level="sequence"`, `loss_type="grpo"`', ((SEQ, GSPO),)),
    Row(
        "grpo/gspo dapo", '`importance_sampling_level="sequence"`', ((TOKEN, GSPO),),
        "long sequences count more: a sequence's gradient goes with its share of the tokens (TRL warns)",
        ((SEQ, GSPO),),
    ),
    Row(
        "grpo/gspo dr_grpo", '`importance_sampling_level="sequence"`, `loss_type="dr_grpo"`',
        ((FIXED, GSPO),), "long sequences count more, and the scale is another", ((SEQ, GSPO),),
    ),
    Row(
        "grpo/gspo paper's clip", "the same with `epsilon=3e-4`, `epsilon_high=4e-4`, `loss_type=\"grpo\"`",
        ((SEQ, NEAR),),
    ),
    Row(
        "grpo/gspo paper's clip, dapo", "the same with `epsilon=3e-4`, `epsilon_high=4e-4`", ((TOKEN, NEAR),),
        "long sequences count more", ((SEQ, NEAR),),
    ),
    Row(
        "gspo_token/grpo", '`importance_sampling_level="sequence_token"`, `loss_type="grpo"` (1.5.1)',
        ((SEQ, GSPO.replace("gspo", "gspo_token")),),
    ),
    Row(
        "gspo_token/dapo", '`importance_sampling_level="sequence_token"` (1.5.1)',
        ((TOKEN, GSPO.replace("gspo", "gspo_token")),), "long sequences count more", ((SEQ, GSPO),),
    ),
    Row(
        "grpo/luspo", '`loss_type="luspo"`, `importance_sampling_level="sequence"`', ((SUM, GSPO),),
    ),
    Row(
        "grpo/luspo token", '`loss_type="luspo"`', ((SUM, CLIP),),
        "without the sequence level it is the sum over tokens of PPO's loss (TRL warns)",
        ((SUM, GSPO.replace("low=0.1, high=0.12", "low=0.2, high=0.2")),),
    ),
    Row(
        "grpo/cispo", '`loss_type="cispo"`, `epsilon_high=5.0`',
        ((TOKEN, "loss.cispo(logp, old_logp, adv, high=4.0)"),),
        "none, but the number: `epsilon_high` is the cap itself, ours and most others' is 1 + high",
    ),
    Row(
        "grpo/cispo eps 1.28", '`loss_type="cispo"`, `epsilon_high=1.28`',
        ((TOKEN, "loss.cispo(logp, old_logp, adv, high=0.28)"),),
    ),
    Row(
        "grpo/cispo eps 0.28", '`loss_type="cispo"`, `epsilon_high=0.28`',
        ((TOKEN, "loss.cispo(logp, old_logp, adv, high=-0.72)"),),
        "DAPO's 0.28 carried over: nearly every weight is the cap, 0.28",
        ((TOKEN, "loss.cispo(logp, old_logp, adv, high=0.28)"),),
    ),
    Row("grpo/sapo", '`loss_type="sapo"`', ((SEQ, "loss.sapo(logp, old_logp, adv)"),)),
    Row(
        "grpo/vespo", '`loss_type="vespo"`', ((TOKEN, VESPO.format("old_logp")),),
        "divided by the tokens of the batch, the paper sums over those of a response",
        ((SUM, VESPO.format("old_logp")),),
    ),
    Row("gmpo/loss", "`GMPOTrainer`", ((SEQ, "loss.gmpo(logp, old_logp, adv, mask, seq, num_seqs)"),)),
    Row(
        "gmpo/loss, narrow", "`GMPOTrainer`, `epsilon=0.2`, `epsilon_high=0.3`",
        ((SEQ, "loss.gmpo(logp, old_logp, adv, mask, seq, num_seqs, low=0.2, high=0.3)"),),
    ),
    Row(
        "dppo/binary_tv", '`DPPOTrainer`, `divergence_type="binary_tv"` (1.5.1)',
        ((TOKEN, "loss.dppo_tv(logp, old_logp, adv, limit=0.15)"),),
    ),
    Row(
        "dppo/binary_kl", '`DPPOTrainer`, `divergence_type="binary_kl"`, both epsilons 0.02 (1.5.1)',
        ((TOKEN, "loss.dppo_kl(logp, old_logp, adv, limit=0.02)"),),
    ),
    Row(
        "a2po/loss", "`A2POTrainer`, V* of the group's own rewards",
        ((SEQ, "loss.a_star(logp, ref_logp, adv, mask, seq, num_seqs)"),),
        let=(("adv", "advantage.a_star(reward[0]).view(-1, 1) * mask"),),
    ),
    Row(
        "rloo/loss, on-policy", "`RLOOTrainer`, on-policy", ((SUM, "loss.reinforce(logp, adv)"),),
        "only the gradients are the same: TRL's loss is -A rho, ours -A logp", value=False,
    ),
    Row(
        "rloo/loss", "`RLOOTrainer`, off-policy",
        "loss.ppo_clip((logp * mask).sum(-1), (old_logp * mask).sum(-1), adv[:, 0]).mean()",
        "PPO's clip on the ratio of the whole response: most of a long response is outside it",
        ((SUM, "loss.reinforce(logp, adv)"),),
    ),
]  # fmt: skip

CUT = (("part", "(torch.arange(16) // 4).view(-1, 1)"),)  # 4 micro-batches of 4 rows
PARTS = [f"mask & (part == {i})" for i in range(4)]
BATCHES = [
    Row("grpo/grpo, 4 micro-batches", '`loss_type="grpo"`', ((SEQ, CLIP),)),
    Row("grpo/dr_grpo, 4 micro-batches", '`loss_type="dr_grpo"`', ((FIXED, CLIP),)),
    Row("grpo/dapo, 4 micro-batches", '`loss_type="dapo"`', ((TOKEN, CLIP),)),
    Row("grpo/sapo, 4 micro-batches", '`loss_type="sapo"`', ((SEQ, "loss.sapo(logp, old_logp, adv)"),)),
    Row(
        "grpo/gspo grpo, 4 micro-batches", '`importance_sampling_level="sequence"`, `loss_type="grpo"`',
        ((SEQ, GSPO),),
    ),
    Row("grpo/luspo, 4 micro-batches", '`loss_type="luspo"`, sequence level', ((SUM, GSPO),)),
    Row(
        "grpo/bnpo, 4 micro-batches", '`loss_type="bnpo"`',
        tuple((f"weight.token_mean({part}) / 4", CLIP) for part in PARTS),
        "each micro-batch has its own denominator: the gradient depends on how the batch is cut",
        ((TOKEN, CLIP),), CUT,
    ),
    Row(
        "grpo/entropy bonus, 4 micro-batches", '`loss_type="grpo"`, `entropy_coef=0.01`',
        ((SEQ, CLIP), *((f"weight.token_mean({part}) / 4", BONUS) for part in PARTS)),
        "the bonus is a token mean of each micro-batch, whatever the loss type",
        ((SEQ, CLIP), (TOKEN, BONUS)), CUT,
    ),
    Row(
        "grpo/high entropy, 4 micro-batches", '`loss_type="dapo"`, `top_entropy_quantile=0.2`',
        tuple((f"weight.high_entropy({TOKEN}, entropy, {part}, share=0.2)", CLIP) for part in PARTS),
        "the threshold is each micro-batch's own, the paper's is the batch's",
        ((HIGH, CLIP),), CUT,
    ),
]  # fmt: skip

KEPT = (("kept", "mask & ~truncated.unsqueeze(-1)"),)
CORRECTIONS = [
    Row("grpo/is off", "`use_vllm=True`, `vllm_importance_sampling_correction=False`", ((TOKEN, CLIP),)),
    Row(
        "grpo/is sequence_mask", "`use_vllm=True` (`sequence_mask`, cap 3, are the defaults)",
        ((f"weight.masked_is_seq({TOKEN}, old_logp, sampler_logp, mask, cap=3.0)", CLIP),),
    ),
    Row(
        "grpo/is sequence_truncate", '`vllm_importance_sampling_mode="sequence_truncate"`',
        ((f"weight.truncated_is_seq({TOKEN}, old_logp, sampler_logp, mask, cap=3.0)", CLIP),),
    ),
    Row(
        "grpo/is token_truncate", '`vllm_importance_sampling_mode="token_truncate"`',
        ((f"weight.truncated_is({TOKEN}, old_logp, sampler_logp, cap=3.0)", CLIP),),
    ),
    Row(
        "grpo/is token_mask", '`vllm_importance_sampling_mode="token_mask"`',
        ((f"weight.masked_is({TOKEN}, old_logp, sampler_logp, cap=3.0)", CLIP),),
    ),
    Row(
        "grpo/is band", '`..._mode="token_mask"`, `..._clip_min=0.5`',
        ((f"weight.icepop({TOKEN}, old_logp, sampler_logp, low=0.5, high=3.0)", CLIP),),
    ),
    Row(
        "grpo/is token_truncate, kl", '`..._mode="token_truncate"`, `beta=0.05`',
        ((f"weight.truncated_is({TOKEN}, old_logp, sampler_logp, cap=3.0)", CLIP), (TOKEN, KL)),
        "the KL term is left uncorrected: two terms with two weights",
        ((f"weight.truncated_is({TOKEN}, old_logp, sampler_logp, cap=3.0)", f"{CLIP} + {KL}"),),
    ),
    Row(
        "grpo/is vespo", '`loss_type="vespo"`, `..._mode="token_truncate"`',
        ((TOKEN, VESPO.format("shifted")),),
        let=(("shifted", "old_logp - (old_logp - sampler_logp).clamp(max=math.log(3))"),),
    ),
    Row(
        "grpo/off-policy mask", '`loss_type="grpo"`, `off_policy_mask_threshold=0.1`',
        ((f"weight.off_policy_mask({SEQ}, logp.detach(), old_logp, adv, mask, limit=0.1)", CLIP),),
    ),
    Row(
        "grpo/is, off-policy mask", '`use_vllm=True`, `token_truncate`, `off_policy_mask_threshold=0.1`',
        ((f"weight.off_policy_mask(weight.truncated_is({TOKEN}, old_logp, sampler_logp, cap=3.0), "
          "logp.detach(), sampler_logp, adv, mask, limit=0.1)", CLIP),),
    ),
    Row("grpo/high entropy", '`loss_type="dapo"`, `top_entropy_quantile=0.2`', ((HIGH, CLIP),)),
    Row(
        "grpo/truncated", '`loss_type="grpo"`, `mask_truncated_completions=True`',
        (("weight.seq_mean(kept) * kept.any(-1).sum() / 16", CLIP),),
        "responses that are masked whole still count in the mean over responses (here 2 of 16)",
        (("weight.seq_mean(kept)", CLIP),), KEPT, counts=False,
    ),
    Row(
        "grpo/truncated, dapo", '`loss_type="dapo"`, `mask_truncated_completions=True`',
        (("weight.token_mean(kept)", CLIP),), let=KEPT,
    ),
]  # fmt: skip

DIVERGENCE = [
    Row(
        "grpo/kl", '`loss_type="grpo"`, `beta=0.05`, `use_bias_correction_kl=False`',
        ((SEQ, f"{CLIP} + {KL}"),),
    ),
    Row(
        "grpo/kl corrected", '`loss_type="grpo"`, `beta=0.05`',
        ((SEQ, f"{CLIP} + loss.ratio(logp, old_logp) * {KL}"),),
        "the ratio multiplies the KL (DeepSeek-V3.2): not so in GRPO's paper, nor by default in trl 1.9.0",
        ((SEQ, f"{CLIP} + {KL}"),),
    ),
    Row(
        "grpo/kl corrected, on-policy", '`loss_type="grpo"`, `beta=0.05`, on-policy',
        ((SEQ, "loss.ppo_clip(logp, logp.detach(), adv) + 0.05 * loss.kl(logp, ref_logp)"),),
    ),
    Row(
        "grpo/kl corrected, sequence",
        '`loss_type="grpo"`, `beta=0.05`, `importance_sampling_level="sequence"`',
        ((SEQ, f"{GSPO} + loss.seq_ratio(logp, old_logp, mask, seq, num_seqs) * {KL}"),),
        "the sequence's ratio multiplies each token's KL: no longer unbiased (TRL notes it)",
        ((SEQ, f"{GSPO} + loss.ratio(logp, old_logp) * {KL}"),),
    ),
    Row("grpo/entropy bonus", '`loss_type="grpo"`, `entropy_coef=0.01`', ((SEQ, CLIP), (TOKEN, BONUS))),
    Row(
        "distillation/reverse kl", "`GKDTrainer.generalized_jsd_loss(beta=1)`",
        "loss.reverse_kl(logits.log_softmax(-1), teacher_logits.log_softmax(-1)).mean()",
    ),
    Row(
        "distillation/forward kl", "`GKDTrainer.generalized_jsd_loss(beta=0)`",
        "loss.forward_kl(logits.log_softmax(-1), teacher_logits.log_softmax(-1)).mean()",
    ),
    Row(
        "distillation/jsd", "`GKDTrainer.generalized_jsd_loss(beta=0.5)`",
        "loss.jsd(logits.log_softmax(-1), teacher_logits.log_softmax(-1), beta=0.5).mean()",
    ),
    Row(
        "distillation/jsd 0.9, temperature", "`generalized_jsd_loss(beta=0.9, temperature=0.7)`",
        "loss.jsd((logits / 0.7).log_softmax(-1), (teacher_logits / 0.7).log_softmax(-1), beta=0.9).mean()",
    ),
]  # fmt: skip

WEIGHTS = "torch.tensor([1.0, 0.5])"
ESTIMATORS = [
    Row(
        "advantage/group", '`scale_rewards="group"` (the default)', "advantage.grpo(reward[0], eps=1e-4)",
        "the eps beside the standard deviation is 1e-4", "advantage.grpo(reward[0])",
    ),
    Row(
        "advantage/group, float32", "the same, in float32", "advantage.grpo(reward[0], eps=1e-4)",
        "rewards and advantages are float32 in every real run", "advantage.grpo(reward[0])", tol=1e-6,
    ),
    Row("advantage/none", '`scale_rewards="none"`', "advantage.grpo(reward[0], scale=False)"),
    Row(
        "advantage/batch", '`scale_rewards="batch"`',
        "advantage.lite_ppo(reward[0], eps=1e-4)",
        "one standard deviation for the batch: Lite PPO's, neither GRPO's nor Dr. GRPO's",
        "advantage.grpo(reward[0])",
    ),
    Row(
        "advantage/two rewards", "two rewards, `reward_weights=[1.0, 0.5]`",
        "advantage.grpo(reward[0] + 0.5 * reward[1], eps=1e-4)",
    ),
    Row(
        "advantage/normalize_then_sum", '`multi_objective_aggregation="normalize_then_sum"`',
        "(a - a.mean()) / (a.std() + 1e-4)", "both eps are 1e-4",
        f"advantage.whiten(advantage.gdpo(reward, {WEIGHTS}), torch.ones(4, 4, dtype=torch.bool))",
        (("a", "advantage.grpo(reward[0], eps=1e-4) + 0.5 * advantage.grpo(reward[1], eps=1e-4)"),),
    ),
    Row("advantage/rloo", "`RLOOTrainer`, `beta=0`", "advantage.rloo(reward[0])"),
    Row(
        "advantage/rloo, kl", "`RLOOTrainer` (`beta=0.05` is the default)",
        "advantage.rloo(reward[0] - 0.05 * (loss.kl_k1(old_logp, ref_logp) * mask).sum(-1).view(4, 4))",
    ),
    Row(
        "advantage/rloo, normalised", "`RLOOTrainer`, `normalize_advantages=True`", "a / (a.std() + 1e-4)",
        "whitened over the batch; the paper's is not", "a", (("a", "advantage.rloo(reward[0])"),),
    ),
]  # fmt: skip

PAIR = "chosen, rejected, ref_chosen, ref_rejected"
SWAPPED = "rejected, chosen, ref_rejected, ref_chosen"
LENGTHS = (("n", "length[:8]"), ("m", "length[8:]"))
LABELS = (("good", "torch.ones(8)"), ("bad", "torch.zeros(8)"))
SINGLE = (
    ("whole", "(logp * mask).sum(-1)"),
    ("ref", "(ref_logp * mask).sum(-1)"),
    ("label", "torch.arange(16) < 8"),
)  # fmt: skip
CREDIT = "token_reward + score.unsqueeze(-1) * (at == {})"
SUPERVISED = [
    Row("dpo/sigmoid", '`DPOTrainer`, `loss_type="sigmoid"`', f"loss.dpo({PAIR}).mean()"),
    Row(
        "dpo/sigmoid, label smoothing", '`loss_type="sigmoid"`, `label_smoothing=0.1`',
        f"loss.dpo({PAIR}).mean()", "label_smoothing is not read by this loss type: no cDPO",
        f"loss.dpo({PAIR}, label_smoothing=0.1).mean()",
    ),
    Row(
        "dpo/robust", '`loss_type="robust"`, `label_smoothing=0.1`',
        f"(0.9 * loss.dpo({PAIR}) - 0.1 * loss.dpo({SWAPPED})).mean() / 0.8",
    ),
    Row(
        "dpo/ipo", '`loss_type="ipo"`',
        "loss.ipo(chosen / n, rejected / m, ref_chosen / n, ref_rejected / m).mean()",
        "log-probs are means over tokens, the paper's are sums", f"loss.ipo({PAIR}).mean()",
        (("n", "length[:8]"), ("m", "length[8:]")),
    ),
    Row("dpo/hinge", '`loss_type="hinge"`', f"loss.hinge({PAIR}).mean()"),
    Row("dpo/exo_pair", '`loss_type="exo_pair"`, `label_smoothing=1e-3`', f"loss.exo({PAIR}).mean()"),
    Row("dpo/nca_pair", '`loss_type="nca_pair"`', f"loss.nca({PAIR}).mean()"),
    Row(
        "dpo/bco_pair", '`loss_type="bco_pair"`',
        "(loss.bco(chosen, ref_chosen, good) + loss.bco(rejected, ref_rejected, bad)).mean()",
        "without the paper's shift of the rewards",
        "(loss.bco(chosen, ref_chosen, good, baseline=shift) + "
        "loss.bco(rejected, ref_rejected, bad, baseline=shift)).mean()",
        (*LABELS, ("shift", "0.05 * (chosen - ref_chosen + rejected - ref_rejected).mean().detach()")),
    ),
    Row(
        "dpo/sppo_hard", '`loss_type="sppo_hard"`', f"loss.sppo({PAIR}, beta=0.1).mean()",
        "none, but the number: beta is 0.1, 1 / eta of the paper 0.001", f"loss.sppo({PAIR}).mean()",
    ),
    Row("dpo/apo_zero", '`loss_type="apo_zero"`', f"loss.apo_zero({PAIR}).mean()"),
    Row("dpo/apo_down", '`loss_type="apo_down"`', f"loss.apo_down({PAIR}).mean()"),
    Row(
        "dpo/sigmoid_norm", '`loss_type="sigmoid_norm"`, `beta=5.0`',
        "loss.dpo(chosen / n, rejected / m, ref_chosen / n, ref_rejected / m, beta=5.0).mean()", let=LENGTHS,
    ),
    Row(
        "dpo/ld_alpha", "`ld_alpha=0.5`",
        "loss.dpo(*(factor * logp).sum(-1).chunk(2), *(factor * ref_logp).sum(-1).chunk(2)).mean()",
        let=(
            ("order", "torch.arange(16).view(2, 8).T.flatten()"),
            ("two", "loss.length_desensitized(mask[order].flatten(), torch.arange(192) // 12, 16)"),
            ("factor", "two.view(16, 12)[order.argsort()] * mask"),
        ),
    ),
    Row(
        "dpo/rpo", '`loss_type=["sigmoid", "sft"]`', f"loss.dpo({PAIR}).mean() - chosen.sum() / n.sum()",
        "the likelihood is a mean over all chosen tokens of the batch, the paper's over one response's",
        f"loss.rpo({PAIR}, n).mean()", LENGTHS[:1],
    ),
    Row(
        "kto/kto", "`KTOTrainer`, `desirable_weight=1.5`, `undesirable_weight=0.5`",
        "loss.kto(whole, ref, label, baseline=kl, desirable_weight=1.5, undesirable_weight=0.5).mean()",
        let=(*SINGLE, ("kl", "((sampler_logp - old_logp) * mask).sum(-1).mean().clamp(min=0)")),
    ),
    Row(
        "kto/apo_zero_unpaired", '`KTOTrainer`, `loss_type="apo_zero_unpaired"`',
        "loss.kto(whole, ref, label).mean()", let=SINGLE,
    ),
    Row("cpo/sigmoid", "`CPOTrainer`, `cpo_alpha=0`", "loss.cpo(chosen, rejected).mean()"),
    Row(
        "cpo/sigmoid, label smoothing", "`CPOTrainer`, `cpo_alpha=0`, `label_smoothing=0.1`",
        "loss.cpo(chosen, rejected, label_smoothing=0.1).mean()",
    ),
    Row(
        "cpo/simpo", '`CPOTrainer`, `loss_type="simpo"`, `beta=2.0`, `simpo_gamma=1.0`, `cpo_alpha=0`',
        "loss.simpo(chosen / n, rejected / m).mean()", let=LENGTHS,
    ),
    Row(
        "orpo/odds", "`ORPOTrainer`, the term of the odds (float32)",
        "(loss.orpo(chosen / n, rejected / m) + chosen / n).mean()",
        "the likelihood that it adds is a mean over the tokens of all prompts and chosen responses of the "
        "batch, the paper's over those of each response",
        let=LENGTHS, tol=1e-5,
    ),
    Row("reward/loss", "`RewardTrainer`", "loss.bradley_terry(score[:8], score[8:]).mean()"),
    Row(
        "reward/margin", "`RewardTrainer` with a column `margin`",
        "loss.bradley_terry(score[:8], score[8:], margin=margin).mean()",
    ),
    Row(
        "reward/centred", "`center_rewards_coefficient=0.01`",
        "loss.bradley_terry(score[:8], score[8:]).mean() + 0.01 * (score[:8] + score[8:]).square().mean()",
    ),
    Row("logits/logp", "`selective_log_softmax`", "logprob.log_probs_from_logits(logits, target).sum()"),
    Row(
        "logits/logp, temperature", "`selective_log_softmax(temperature=0.7)`",
        "logprob.log_probs_from_logits(logits, target, temperature=0.7).sum()",
    ),
    Row("logits/entropy", "`entropy_from_logits`", "logprob.entropy_from_logits(logits).sum()"),
    Row(
        "ppo/loss", "`PPOTrainer` (1.5.1): reward, GAE, both losses",
        ((TOKEN, CLIP),
         ("0.1 * weight.token_mean(longer)", "loss.value_clip(value_long, old_value_long, ret)")),
        "the reward is credited, and a value read, one position after the last token",
        ((TOKEN, "loss.ppo_clip(logp, old_logp, papers)"),
         ("0.1 * weight.token_mean(mask)", "loss.value_clip(value, old_value, papers_ret)")),
        (
            ("at", "torch.arange(12)"),
            ("last", "length.unsqueeze(-1) - 1"),
            ("token_reward", "-0.05 * loss.kl_k1(old_logp, ref_logp)"),
            ("longer", "at <= last + 1"),
            ("value_long", "value + value_after.unsqueeze(-1) * (at == last + 1)"),
            ("old_value_long", "old_value + old_value_after.unsqueeze(-1) * (at == last + 1)"),
            ("one", "torch.ones(16, 12)"),
            ("late", CREDIT.format("(last + 1).clamp(max=11)")),
            ("adv_ret", "advantage.gae(late, old_value_long, one, 0.95, mask=longer)"),
            ("adv", "advantage.whiten(adv_ret[0], mask)"),
            ("ret", "adv_ret[1]"),
            ("papers_adv_ret", f"advantage.gae({CREDIT.format('last')}, old_value, one, 0.95, mask=mask)"),
            ("papers", "advantage.whiten(papers_adv_ret[0], mask)"),
            ("papers_ret", "papers_adv_ret[1]"),
        ),
    ),
]  # fmt: skip

SECTIONS = {
    "Policy losses": POLICY,
    "The same batch in four micro-batches": BATCHES,
    "Corrections and masks": CORRECTIONS,
    "KL, entropy, distillation": DIVERGENCE,
    "Advantages": ESTIMATORS,
    "Preferences, rewards, log-probs, PPO": SUPERVISED,
}
ROWS = {f"{title}: {row.key}": row for title, rows in SECTIONS.items() for row in rows}
