"""What torch 2.11 and transformers 5.16, the oldest that are allowed, do otherwise: `make test-floor`."""

import pytest
import torch
import transformers

__all__ = ["LACKS", "OLD_ONEDNN", "require"]

OLD_ONEDNN = torch.__version__.startswith("2.11.")  # 3.10: other bits for few rows where the weight is packed

# of transformers 5.16, by family; the library refuses them, packs them one sequence at a time, or cannot know
LACKS = {
    "DeepseekV2 routers": "its outputs are not recorded",
    "DeepseekV3 routers": "its outputs are not recorded",
    "Glm4Moe routers": "its outputs are not recorded",
    "GraniteMoe routers": "its outputs are not recorded",
    "Lfm2Moe routers": "its outputs are not recorded",
    "Jamba routers": "they are plain linear layers",
    "RecurrentGemma states": "its layers do not hand on the boundaries, so attention has a [T, T] mask",
    "Llama4Text packs": "tokens of other sequences are seen, so it is given one at a time",
    "Doge tokens": "a token sees later ones",
    "AXK2 padding": "keys are chosen among those of padding too",
    "DeepseekV32 padding": "keys are chosen among those of padding too",
    "GlmMoeDsa padding": "keys are chosen among those of padding too",
    "longrope generate": "its own greedy tokens are others after the switch",
    "Qwen2_5Omni folders": "the weights of the parts that speak count as unexpected",
}


def require(what):
    """Skip what transformers 5.16 lacks, there alone."""
    if what in LACKS and transformers.__version__.startswith("5.16."):
        pytest.skip(f"transformers {transformers.__version__}, {what}: {LACKS[what]}")
