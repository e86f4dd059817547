"""The definition of what the kernels compute: values and gradients in float64 numpy, for tests only."""

import numpy as np
from ref import rounding


def logit_rounding(h, w):
    """How far a logit of h [T, D] wᵀ [D, V] may be from the exact one in float32."""
    return rounding(h.shape[1], (h.double().abs() @ w.double().abs().T).max())


def logp_rounding(h, w):
    """The same for a log-probability: its logit, those in the lse, and the lse's sum of V terms."""
    return 2 * logit_rounding(h, w) + rounding(len(w), 1)


def _logits(h, w, temperature, bias, softcap):
    """z [T, V] and dz/d(h wᵀ) [T, V]."""
    temperature = np.broadcast_to(np.asarray(temperature, np.float64), h.shape[:1])[:, None]
    x = h @ w.T + (0 if bias is None else bias)
    if softcap is None:
        return x / temperature, np.ones_like(x) / temperature
    return softcap * np.tanh(x / softcap) / temperature, 1 / np.cosh(x / softcap) ** 2 / temperature


def linear_logprob(h, w, y, *, temperature=1.0, bias=None, softcap=None):
    """h [T, D], w [V, D], y [T] -> logp, entropy, lse, each [T]."""
    z, _ = _logits(h, w, temperature, bias, softcap)
    top = z.max(1, keepdims=True)
    lse = np.log(np.exp(z - top).sum(1)) + top[:, 0]
    log_p = z - lse[:, None]
    return log_p[np.arange(len(y)), y], -(np.exp(log_p) * log_p).sum(1), lse


def gradients(h, w, y, g, g_entropy, g_lse, *, temperature=1.0, bias=None, softcap=None):
    """Gradients of sum(g logp + g_entropy entropy + g_lse lse): dh [T, D], dw [V, D], dbias [V]."""
    options = {"temperature": temperature, "bias": bias, "softcap": softcap}
    z, slope = _logits(h, w, **options)
    _, entropy, lse = linear_logprob(h, w, y, **options)
    log_p = z - lse[:, None]
    p = np.exp(log_p)
    dz = (g_lse - g)[:, None] * p
    dz[np.arange(len(y)), y] += g
    dz -= g_entropy[:, None] * p * (log_p + entropy[:, None])
    dx = dz * slope
    return dx @ w, dx.T @ h, dx.sum(0)


def rms_norm(x, weight, eps):
    """x [R, D]: each row over its root mean square, times weight [D]."""
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def rotated(x, cos, sin):
    """x [R, H, D]: number i of the first half and that of the second are turned by an angle of theirs."""
    out = np.empty_like(x)
    half = x.shape[-1] // 2
    for i in range(half):
        a, b = x[..., i], x[..., i + half]
        out[..., i] = a * cos[:, None, i] - b * sin[:, None, i]
        out[..., i + half] = b * cos[:, None, i + half] + a * sin[:, None, i + half]
    return out


def swiglu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def attend(q, keys, values, bias, scale):
    """q [R, H, D], keys and values [R, H', W, D], bias [R, W]: softmax over the columns that a row sees."""
    out = np.zeros_like(q)
    for r, head in np.ndindex(*q.shape[:2]):
        seen = np.flatnonzero(bias[r] > -np.inf)
        of = head // (q.shape[1] // keys.shape[1])
        z = keys[r, of, seen] @ q[r, head] * scale + bias[r, seen]
        p = np.exp(z - z.max()) if len(seen) else z
        out[r, head] = p @ values[r, of, seen] / p.sum() if len(seen) else 0
    return out
