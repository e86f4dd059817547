"""Log-probs straight from hidden states, by the fused head of rft_kernels."""

import torch
from torch import Tensor

from rft_fn import check
from rft_fn.logprob.of_logits import sum_p2
from rft_fn.types import TokenOut

__all__ = ["default_workspace_mb", "linear_logprob"]


def default_workspace_mb(device_type: str) -> float:
    """Return the MiB of logits that `linear_logprob` holds at a time by default, on "cpu" or "cuda"."""
    from rft_kernels import default_workspace_mb as of_device

    return of_device(device_type)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = False,
    squares: bool = False,
    words: Tensor | None = None,
    workspace_mb: float | None = None,
    engine: str = "auto",
) -> TokenOut:
    """Return log softmax(hidden weight^T / temperature)[target], [T, D], [V, D], [T] -> TokenOut.

    Never holds logits [T, V]. Targets of -100 give 0 and no gradient, even where hidden is NaN. `words`
    [T, K] asks for the log-probs of K more words of each token, as `words_logp` [T, K] (0 with target -100):
    K dot products each, for the normaliser is there already. `squares` asks for `sum_p2` [T], without
    gradient, at the price of one more forward of the head. `workspace_mb` bounds the logits that exist at a
    time (None: chosen per device). The work is done by `rft_kernels.linear_logprob`, by one of its engines:
    they can be differentiated once. "reference" holds whole logits and has derivatives of any order, in the
    temperature too. ValueError when shapes disagree.
    """
    from rft_kernels import linear_logprob as fused

    logp, ent, lse = fused(
        hidden,
        weight,
        target,
        temperature=temperature,
        bias=bias,
        softcap=softcap,
        entropy=entropy,
        lse=words is not None,
        workspace_mb=workspace_mb,
        engine=engine,
    )
    p2 = None
    if squares:
        with torch.no_grad():
            half = fused(
                hidden,
                weight,
                target,
                temperature=temperature / 2,
                bias=bias,
                softcap=softcap,
                workspace_mb=workspace_mb,
                engine=engine,
            )[0]
        p2 = torch.where(target != -100, sum_p2(logp, half), 0)
    if words is None or lse is None:
        return TokenOut(logp=logp, entropy=ent, sum_p2=p2)

    # The logits of the words; a where only on the result would leave 0 * NaN in the gradient of the weight.
    check.shapes(target=(target, "T"), words=(words, "T K"))
    live = (target != -100).unsqueeze(-1)
    hidden = torch.where(live, hidden, 0)
    z = torch.einsum("td,tkd->tk", hidden.to(logp.dtype), weight[words].to(logp.dtype))
    if bias is not None:
        z = z + bias[words]
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)

    # The softmax of all words is in lse.
    if isinstance(temperature, Tensor) and temperature.dim():
        temperature = temperature.unsqueeze(-1)  # one per token
    words_logp = torch.where(live, z / temperature - lse.unsqueeze(-1), 0)
    return TokenOut(logp=logp, entropy=ent, sum_p2=p2, words_logp=words_logp)
