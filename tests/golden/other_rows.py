"""Which settings of verl, OpenRLHF and AReaL equal which call of ours, as `equivalence.py` has it for TRL.
Estimators are rows about the gradient of -A logp, which holds their numbers."""

from golden.equivalence import CLIP, GSPO, SEQ, SUM, TOKEN, Row

DUAL = "loss.ppo_clip(logp, old_logp, adv, dual=3.0)"
GMPO = "loss.gmpo(logp, old_logp, adv, mask, seq, num_seqs)"
TWICE = "clips twice, always (`clip_ratio_c=3`)"
CAP = "the ratio is capped at `clip_ratio_c=3`, the paper's and our cap is 20"
COV = "weight.covariance(logp.detach(), adv, mask)"
KL_COV = "loss.kl_cov(logp, old_logp, adv, chosen)"
AT_END = ("token_reward", "reward[0].view(16, 1) * (torch.arange(12) == length.unsqueeze(-1) - 1)")
SCORE = (("mask.double()", "loss.reinforce(logp, adv)"),)
PLAIN = (("mask.double()", "loss.reinforce(logp, plain)"),)
EPS = 3e-8  # where verl adds 1e-8 to a count of tokens
ONE = ("one", "torch.ones(16, 12)")
CENTRED = "advantage.reinforce_pp_baseline(reward[0]).view(-1, 1) * mask"
RESET = "torch.where(mask, advantage.discounted_return(token_reward, mask.double().roll(-1, -1)), 0)"


def verl(key: str, setting: str, ours, differs: str = "", paper=None, let=(), **more) -> Row:
    """verl leaves responses without tokens out of its means, as ours do."""
    return Row(f"verl/{key}", setting, ours, differs, paper, let, counts=more.pop("counts", False), **more)


VERL = [
    verl(
        "vanilla", "`vanilla`", ((TOKEN, DUAL),),
        f"{TWICE}: without `dual=3.0` our gradient has 2.7 times the norm of verl's at 1.5", ((TOKEN, CLIP),),
    ),
    verl(
        "vanilla higher", "`vanilla`, `clip_ratio_high=0.28`",
        ((TOKEN, "loss.ppo_clip(logp, old_logp, adv, high=0.28, dual=3.0)"),), TWICE,
        ((TOKEN, "loss.ppo_clip(logp, old_logp, adv, high=0.28)"),),
    ),
    verl(
        "vanilla seq", '`vanilla`, `"seq-mean-token-mean"`', ((SEQ, DUAL),), TWICE, ((SEQ, CLIP),), tol=EPS,
    ),
    verl("vanilla sum", '`vanilla`, `"seq-mean-token-sum"`', ((SUM, DUAL),), TWICE, ((SUM, CLIP),)),
    verl(
        "vanilla norm", '`vanilla`, `"seq-mean-token-sum-norm"`', (("weight.constant(mask, 12)", DUAL),),
        f"{TWICE}; the constant is the padded length unless `loss_scale_factor` is set",
        (("weight.constant(mask, 12)", CLIP),),
    ),
    verl("gspo", '`gspo`, `"seq-mean-token-mean"`', ((SEQ, GSPO),), tol=EPS),
    verl(
        "gspo token", '`gspo`, `"token-mean"` (the default of its configuration)', ((TOKEN, GSPO),),
        "long sequences count more", ((SEQ, GSPO),),
    ),
    verl("sapo", "`sapo`", ((SEQ, "loss.sapo(logp, old_logp, adv)"),), tol=EPS),
    verl(
        "cispo", "`cispo`", ((TOKEN, "loss.cispo(logp, old_logp, adv, low=0.2, high=0.2)"),),
        "weights are clipped to [0.8, 1.2]", ((TOKEN, "loss.cispo(logp, old_logp, adv)"),),
    ),
    verl(
        "cispo wide", "`cispo`, `clip_ratio_low=1`, `clip_ratio_high=4`",
        ((TOKEN, "loss.cispo(logp, old_logp, adv)"),),
    ),
    verl(
        "geo_mean", "`geo_mean`, both limits 0.4", ((SEQ, GMPO),),
        "a response without tokens counts in the mean", tol=EPS, counts=True,
    ),
    verl(
        "dppo_tv", "`dppo_tv`, both limits 0.15",
        ((TOKEN, "loss.dppo_tv(logp, old_logp, adv, cap=3.0)"),), CAP,
        ((TOKEN, "loss.dppo_tv(logp, old_logp, adv)"),),
    ),
    verl(
        "dppo_tv 20", "`dppo_tv`, both limits 0.15, `clip_ratio_c=20`",
        ((TOKEN, "loss.dppo_tv(logp, old_logp, adv)"),),
    ),
    verl(
        "dppo_kl", "`dppo_kl`, both limits 0.05",
        ((TOKEN, "loss.dppo_kl(logp, old_logp, adv, cap=3.0)"),), CAP,
        ((TOKEN, "loss.dppo_kl(logp, old_logp, adv)"),),
    ),
    verl(
        "dppo_kl 20", "`dppo_kl`, both limits 0.05, `clip_ratio_c=20`",
        ((TOKEN, "loss.dppo_kl(logp, old_logp, adv)"),),
    ),
    verl("gpg", "`gpg`", ((TOKEN, "loss.reinforce(logp, adv)"),)),
    verl(
        "clip_cov", "`clip_cov`, `clip_cov_ratio=1`, `clip_cov_lb=0.2`",
        ((f"weight.clip_cov({TOKEN}, {COV}, mask, 0, share=1.0, low=0.2)", CLIP),),
        "with a smaller share the draws differ: see below the table",
    ),
    verl(
        "kl_cov", "`kl_cov`, `kl_cov_ratio=0.05`, `ppo_kl_coef=1`",
        ((TOKEN, "chosen * (logp - old_logp).abs() - loss.ratio(logp, old_logp) * adv"),),
        "the penalty is the absolute log-ratio, which pulls as hard at any distance; ours is the KL "
        "(ρ - 1 - log ρ)",
        ((TOKEN, KL_COV),),
        (("chosen", f"weight.top_share({COV}, mask, share=int(mask.sum()) // 20 / int(mask.sum()))"),),
    ),
    verl("grpo", "advantage `grpo`", SCORE, let=(("adv", "advantage.grpo(reward[0]).view(-1, 1) * mask"),)),
    verl("rloo", "advantage `rloo`", SCORE, let=(("adv", "advantage.rloo(reward[0]).view(-1, 1) * mask"),)),
    verl(
        "opo", "advantage `opo`", SCORE,
        let=(("adv", "advantage.opo(reward[0], mask.sum(-1).view(4, 4)).view(-1, 1) * mask"),),
    ),
    verl(
        "reinforce_pp_baseline", "advantage `reinforce_plus_plus_baseline`", SCORE,
        let=(("adv", f"advantage.whiten({CENTRED}, mask)"),),
    ),
    verl(
        "reinforce_pp", "advantage `reinforce_plus_plus`", SCORE,
        let=(AT_END, ("adv", "advantage.whiten(advantage.reinforce_pp(token_reward, mask), mask)")),
    ),
    verl(
        "reinforce_pp 0.7", "advantage `reinforce_plus_plus` (verl 0.7.0)", SCORE,
        "the return starts anew at a tool's tokens: what was sampled before them learns nothing of the "
        "reward; against the row `reinforce_pp`", PLAIN,
        (AT_END, ("adv", f"advantage.whiten({RESET}, mask)"),
         ("plain", "advantage.whiten(advantage.reinforce_pp(token_reward, mask), mask)")),
    ),
    verl(
        "gpg advantage", "advantage `gpg`", SCORE,
        "alpha counts rewards other than 0, not groups that differ", PLAIN,
        (("alpha", "16 / (reward[0] != 0).sum()"), ("centred", "advantage.grpo(reward[0], scale=False)"),
         ("adv", "alpha * centred.view(-1, 1) * mask"),
         ("plain", "advantage.gpg(reward[0]).view(-1, 1) * mask")),
    ),
    verl("dro", "`dro`, `dro_beta=0.1`", ((TOKEN, "loss.dro(logp, old_logp, adv)"),)),
    verl(
        "grpo_passk", "advantage `grpo_passk`, `norm_adv_by_std_in_grpo=False`", SCORE,
        let=(("adv", "advantage.best_minus_second(reward[0]).view(-1, 1) * mask"),),
    ),
    verl(
        "grpo_passk scaled", "advantage `grpo_passk`", SCORE, "divided by the group's deviation", PLAIN,
        (("adv", "advantage.best_minus_second(reward[0], scale=True).view(-1, 1) * mask"),
         ("plain", "advantage.best_minus_second(reward[0]).view(-1, 1) * mask")),
    ),
    verl(
        "otb", "advantage `tir_optimal_token_baseline`", SCORE, tol=1e-6,
        let=(("p", "old_logp.exp()"), ("p2", "p**2 + (1 - p) ** 2 / 6"), ("group", "torch.arange(16) // 4"),
             ("ret", "reward[0].view(16, 1)"),
             ("adv", "advantage.optimal_token_baseline(ret, old_logp, p2, mask, group)")),
    ),
    verl(
        "geometric", '`rollout_rs="seq_mean_k1"`, `"0.7_1.4"`',
        (("weight.geometric_mask(mask.double(), old_logp, sampler_logp, mask, low=1 / 1.4, high=1 / 0.7)",
          "loss.reinforce(logp, adv)"),),
        "its band is of sampler to trainer, ours of trainer to sampler",
        (("weight.geometric_mask(mask.double(), old_logp, sampler_logp, mask, low=0.7, high=1.4)",
          "loss.reinforce(logp, adv)"),),
    ),
    verl(
        "rejected by the largest", '`rollout_rs="seq_max_k2"`, 1.0',
        (("weight.trust_region_mask(mask.double(), old_logp, sampler_logp, mask, limit=1.0)",
          "loss.reinforce(logp, adv)"),),
    ),
    verl(
        "rejected twice", '`rollout_rs="token_k2,seq_mean_k3"`, `"0.5,0.6"`',
        (("weight.within(weight.within(mask.double(), k2, high=0.5), weight.row_mean(k3, mask), high=0.6)",
          "loss.reinforce(logp, adv)"),),
        let=(("k2", "loss.kl_k2(sampler_logp, old_logp)"), ("k3", "loss.kl_k3(sampler_logp, old_logp)")),
    ),
    verl(
        "rejected by the sum", '`rollout_rs="seq_sum_k1"`, `"0.3_3.0"`',
        (("weight.within(mask.double(), weight.row_sum(k1, mask), low=math.log(0.3), high=math.log(3))",
          "loss.reinforce(logp, adv)"),),
        let=(("k1", "loss.kl_k1(sampler_logp, old_logp)"),),
    ),
    verl(
        "normalised", '`rollout_is="token"`, `rollout_is_batch_normalize=True`',
        (("weight.self_normalized(weight.truncated_is(mask.double(), old_logp, sampler_logp), mask.double())",
          "loss.reinforce(logp, adv)"),),
        tol=EPS,
    ),
    verl(
        "gae", "advantage `gae`, λ = 0.95", SCORE, "whitened over the batch; the row `ppo` is not", PLAIN,
        (AT_END, ONE, ("plain", "advantage.gae(token_reward, old_value, one, 0.95, mask=mask)[0]"),
         ("adv", "advantage.whiten(plain, mask)")),
    ),
    verl(
        "value", "`compute_value_loss`, its own returns",
        ((TOKEN, "loss.value_clip(value, old_value, ret)"),),
        let=(AT_END, ONE, ("ret", "advantage.gae(token_reward, old_value, one, 0.95, mask=mask)[1]")),
    ),
]  # fmt: skip

OPENRLHF = [
    Row("openrlhf/ppo", "`PolicyLoss()`", ((TOKEN, CLIP),), counts=False),
    Row("openrlhf/ppo seq", "`token_level_loss=False`", ((SEQ, CLIP),), counts=False, tol=EPS),
    Row("openrlhf/dual", "`dual_clip=3.0` (off by default)", ((TOKEN, DUAL),), counts=False),
    Row("openrlhf/gspo", '`policy_loss_type="gspo"`', ((SEQ, GSPO),), counts=False, tol=EPS),
]
AREAL = [
    Row("areal/ppo", "`ppo_actor_loss_fn(eps_clip=0.2)`", ((TOKEN, CLIP),), counts=False),
    Row("areal/dual", "`c_clip=3.0` (off by default)", ((TOKEN, DUAL),), counts=False),
    Row(
        "areal/sequence", '`importance_sampling_level="sequence"`', ((TOKEN, GSPO),),
        "long sequences count more", ((SEQ, GSPO),), counts=False,
    ),
    Row(
        "areal/m2po", "`m2_threshold=0.04`, its mask",
        (("weight.second_moment_mask(mask.double(), old_logp, sampler_logp, mask)",
          "loss.reinforce(logp, adv)"),),
        counts=False,
    ),
]  # fmt: skip
OTHERS = {"verl": VERL, "OpenRLHF": OPENRLHF, "AReaL": AREAL}
