"""One small ragged batch, the same on every machine: what every number in trl.json was computed on.

The standard library's generator, so that neither torch's nor numpy's version matters; six decimals, so that
the file holds exactly what was used. In `make()` everything is 0 outside mask; `scaled` has tokens there.
"""

import random

N, G, S = 4, 4, 12  # prompts, responses a prompt, the longest response
B = N * G
V = 7  # words, for the rows about logits
SCALES = (0.05, 0.3, 1.5)  # of log-ratios
SILENT = 6  # the response of `scaled` without a token in mask


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


def scaled(scale: float, *, holes: bool = True, silent: bool = True) -> dict[str, list]:
    """`make()` with log-ratios of that scale. With `holes` a tool spoke in a third of each response's places:
    log-probs are there, but the mask is off. With `silent` one response has no token in mask. Entropies are
    exact in float32, in which TRL takes its threshold."""
    out, rng = make(), random.Random(f"{scale} {holes} {silent}")
    whole, length = out["mask"], out["length"]

    def near(name: str, scale: float) -> list[list[float]]:
        moved = [[min(round(x + gauss(rng, scale), 6), -0.01) for x in row] for row in out[name]]
        return [[x if inside else 0.0 for x, inside in zip(*row)] for row in zip(moved, whole)]

    out["old_logp"] = near("logp", scale)
    out["sampler_logp"] = near("old_logp", 0.8)
    out["entropy"] = [[round(x * 1024) / 1024 for x in row] for row in out["entropy"]]
    out["mask"] = [
        [t < n and (t == n - 1 or not holes or rng.random() > 1 / 3) for t in range(S)] for n in length
    ]
    if silent:
        out["mask"][SILENT] = [False] * S
        out["truncated"] = [b in (3, 9) if holes else b == SILENT for b in range(B)]
    return out
