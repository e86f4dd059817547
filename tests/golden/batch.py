"""One small ragged batch, the same on every machine: what every number in trl.json was computed on.

The standard library's generator, so that neither torch's nor numpy's version matters; six decimals, so that
the file holds exactly what was used. Everything is 0 outside mask.
"""

import random

N, G, S = 4, 4, 12  # prompts, responses a prompt, the longest response
B = N * G
V = 7  # words, for the rows about logits


def gauss(rng, scale=1.0):
    return round(rng.gauss(0.0, scale), 6)


def make(seed: int = 20260822) -> dict[str, list]:
    """Names to (nested) lists of numbers."""
    rng = random.Random(seed)
    length = [S, 2, *(rng.randint(2, S) for _ in range(B - 2))]
    rng.shuffle(length)
    mask = [[t < n for t in range(S)] for n in length]
    tokens = lambda draw: [[draw(b, t) if mask[b][t] else 0.0 for t in range(S)] for b in range(B)]  # noqa: E731
    logp = tokens(lambda b, t: -abs(gauss(rng)) - 0.05)
    near = lambda scale: tokens(lambda b, t: min(round(logp[b][t] + gauss(rng, scale), 6), -0.01))  # noqa: E731
    out = {"length": length, "mask": mask, "logp": logp}
    out |= {"old_logp": near(0.3), "near_logp": near(1e-3), "ref_logp": near(0.5)}
    out["sampler_logp"] = tokens(lambda b, t: min(round(out["old_logp"][b][t] + gauss(rng, 0.8), 6), -0.01))
    out["entropy"] = tokens(lambda b, t: abs(gauss(rng)))
    out["adv"] = [gauss(rng) for _ in range(B)]
    out["reward"] = [[rng.randint(-8, 8) / 8 for _ in range(B)] for _ in range(2)]  # exact in float32
    out["reward"][0][:G] = [0.5] * G  # a group without a preference
    out["truncated"] = [b in (3, 9) for b in range(B)]
    out["value"] = tokens(lambda b, t: gauss(rng, 0.5))
    out["old_value"] = tokens(lambda b, t: round(out["value"][b][t] + gauss(rng, 0.3), 6))
    out["value_after"] = [gauss(rng, 0.5) for _ in range(B)]  # of the position after the last token
    out["old_value_after"] = [round(v + gauss(rng, 0.3), 6) for v in out["value_after"]]
    out["score"] = [gauss(rng) for _ in range(B)]  # of a reward model; the first half is chosen
    out["margin"] = [abs(gauss(rng)) for _ in range(B // 2)]
    for name in ("logits", "teacher_logits"):
        out[name] = [[gauss(rng) for _ in range(V)] for _ in range(B)]
    out["target"] = [rng.randrange(V) for _ in range(B)]
    return out
