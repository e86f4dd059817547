"""Reads a config of speculative decoding, and refuses one under which samples are not of the model.

A draft that is verified by rejection sampling leaves the law of each token as it is, so log-probs of the
target model, which is what vLLM reports, are those of what was sampled.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft_fn import border

__all__ = ["OPTION", "check_exact", "of_option"]

OPTION = "engine_speculative"
METHODS = (
    "dflash", "draft_model", "dspark", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "ngram",
    "ngram_gpu", "suffix",
)  # fmt: skip
"""Methods of vLLM whose drafts it verifies; the multi-token heads of a family are called FAMILY_mtp."""
VERIFIED = ("standard", "block")  # ways to verify that keep the law


def of_option(option: str) -> dict[str, Any]:
    """Return the config in an option: JSON, or the name of a file of it. ValueError as of `check_exact`."""
    text, where = option, OPTION
    if not option.lstrip().startswith("{"):
        try:
            text, where = Path(option).expanduser().read_text(errors="replace"), f"{OPTION}: {option}"
        except (OSError, RuntimeError, ValueError):
            raise ValueError(
                f"{OPTION}: expected JSON or a file of it, got {border.quoted(option)}"
            ) from None
    try:
        config = border.read_json(text)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    border.object_of(where, config)
    check_exact(OPTION, config)
    return config


def check_exact(name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a config under which tokens are not drawn from the model's distribution.

    That is a method whose drafts are not verified, an acceptance that is made up, drafts of which a part is
    verified that goes by their own tokens, and a vLLM that loses their temperatures (`worker.drafts_of`).
    Other fields are vLLM's to check.
    """
    method = config.get("method")
    if method is None and not config.get("model"):
        got = ", ".join(config) or "none"
        raise ValueError(f"{name}: expected a method, or the model that drafts, got {got}")
    if method is not None and method not in METHODS and not str(method).endswith("_mtp"):
        raise ValueError(
            f"{name}: method: expected one whose drafts are verified ({', '.join(METHODS)}), got "
            f"{border.quoted(method)}"
        )
    size = config.get("num_speculative_tokens")
    if size is not None:
        border.integer(f"{name}: num_speculative_tokens", size, low=1)
    way = config.get("rejection_sample_method") or VERIFIED[0]
    if way not in VERIFIED:
        raise ValueError(
            f"{name}: rejection_sample_method: expected {' or '.join(VERIFIED)}, which keep the model's "
            f"distribution, got {border.quoted(way)}"
        )
    if config.get("enable_adaptive_verification"):
        raise ValueError(
            f"{name}: enable_adaptive_verification: expected False, got True: which drafts are verified goes "
            "by their own tokens, and samples are not of the model's distribution"
        )
    if config.get("by_temperature") is False:
        raise ValueError(
            f"{name}: expected a vLLM that keeps the temperatures of drafted tokens, got one that loses them "
            "(0.32.0 without Triton, as on a CPU)"
        )
