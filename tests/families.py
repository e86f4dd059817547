"""Small random models of the text families of transformers, by the name of their config class.

`small("Llama")` is one; `FAMILIES` are the settings of each. Only what makes a model small is set, and what
brings out all kinds of layers a family has. `far("Mistral")` is one whose layers change behind `AT` tokens.
"""

import torch

__all__ = ["AT", "FAMILIES", "FAR", "SINGLE", "VOCAB", "config", "far", "hearing", "seeing", "small"]

VOCAB = 60
BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
USUAL = BASE | {
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
NARROW = USUAL | {"head_dim": 8}  # of those whose heads are otherwise 64 and more
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
GPT = BASE | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}

FAMILIES = {
    "Afmoe": NARROW | EXPERTS | SLIDING | {"num_shared_experts": 1, "num_dense_layers": 1},
    "Apertus": USUAL,
    "Arcee": USUAL,
    "Bamba": USUAL | MAMBA | {"attn_layer_indices": [1]},
    "BioGpt": USUAL | {"scale_embedding": False},
    "BitNet": USUAL,
    "Bloom": BASE | {"n_head": 4, "n_layer": 2},
    "CodeGen": GPT | {"n_ctx": 128, "rotary_dim": 4},
    "Cohere": USUAL | {"logit_scale": 0.3},
    "Cohere2": USUAL | SLIDING | {"logit_scale": 0.3},
    "DeepseekV2": USUAL | GROUPED | LATENT,
    "DeepseekV3": USUAL | GROUPED | LATENT,
    "DiffLlama": USUAL,
    "Doge": USUAL,
    "Dots1": NARROW | GROUPED | {"num_key_value_heads": 4, "routed_scaling_factor": 1.0},
    "Ernie4_5": NARROW,
    "Ernie4_5_Moe": USUAL | {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "Exaone4": USUAL | SLIDING,
    "Falcon": BASE | {"num_attention_heads": 4, "alibi": True},
    "FalconH1": USUAL | MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.3},
    "FalconMamba": BASE | {"state_size": 4},
    "FlexOlmo": USUAL | {"num_experts": 4, "num_experts_per_tok": 2},
    "GPT2": GPT,
    "GPTBigCode": GPT,
    "GPTJ": GPT | {"rotary_dim": 4},
    "GPTNeo": BASE | {
        "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 64,
        "max_position_embeddings": 128,
    },
    "GPTNeoX": USUAL,
    "Gemma": NARROW,
    "Gemma2": NARROW | {"final_logit_softcapping": 2.0, "attn_implementation": "eager"},
    "Gemma3Text": NARROW | SLIDING | {"final_logit_softcapping": 2.0},
    "Gemma4Text": NARROW | SLIDING | {
        "global_head_dim": 8, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
    },
    "Glm": NARROW,
    "Glm4": NARROW,
    "Glm4Moe": NARROW | GROUPED,
    "GptOss": NARROW | LOCAL | {"sliding_window": 64},
    "Granite": USUAL | {"logits_scaling": 4.0},
    "GraniteMoe": USUAL | LOCAL,
    "GraniteMoeHybrid": USUAL | MAMBA | LOCAL | {
        "mamba_expand": 2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16,
    },
    "GraniteSWA": USUAL | {"sliding_window": 64},
    "Helium": NARROW,
    "HunYuanDenseV1": NARROW,
    "Jamba": USUAL | {
        "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_offset": 1, "attn_layer_period": 2,
        "mamba_d_state": 4,
    },
    "JetMoe": USUAL | {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "KimiLinear": USUAL | EXPERTS | LATENT | {
        "q_lora_rank": None, "num_local_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "Lfm2": USUAL | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Lfm2Moe": USUAL | EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Llama": USUAL,
    "Llama4Text": NARROW | LOCAL | {
        "intermediate_size_mlp": 48, "num_experts_per_tok": 1, "attention_chunk_size": 64,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "Mamba": BASE | {"state_size": 4},
    "Mamba2": BASE | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "MiniMax": NARROW | LOCAL | {"block_size": 8},
    "MiniMaxM2": NARROW | LOCAL | {"rotary_dim": 8},
    "Ministral": NARROW | {"sliding_window": 64},
    "Mistral": USUAL,
    "Mixtral": USUAL | {"num_local_experts": 4},
    "Mpt": BASE | {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "NanoChat": USUAL,
    "Nemotron": USUAL,
    "NemotronH": NARROW | {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8,
    },
    "OPT": USUAL | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo": USUAL,
    "Olmo2": USUAL,
    "Olmo3": USUAL | SLIDING,
    "OlmoHybrid": USUAL | DELTA,
    "Olmoe": USUAL | {"num_experts": 4, "num_experts_per_tok": 2},
    "Persimmon": USUAL,
    "Phi": USUAL,
    "Phi3": USUAL,
    "Phimoe": USUAL | {"num_local_experts": 4},
    "Qwen2": USUAL,
    "Qwen2Moe": USUAL | EXPERTS,
    "Qwen3": NARROW,
    "Qwen3Moe": NARROW | EXPERTS,
    "Qwen3Next": NARROW | DELTA | EXPERTS,
    "Qwen3_5MoeText": NARROW | DELTA | EXPERTS,
    "Qwen3_5Text": NARROW | DELTA,
    "RecurrentGemma": NARROW | {
        "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64, "logits_soft_cap": 2.0
    },
    "Rwkv": BASE | {"attention_hidden_size": 32, "context_length": 128},
    "SeedOss": NARROW,
    "SmolLM3": USUAL,
    "StableLm": USUAL,
    "Starcoder2": USUAL,
    "VaultGemma": NARROW | SLIDING | {"final_logit_softcapping": 2.0},
    "XGLM": BASE | {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "Zamba": USUAL | {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 16,
        "n_mamba_heads": 2, "mamba_d_state": 4,
    },
    "Zamba2": USUAL | {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 16,
        "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 8,
        "num_mem_blocks": 1,
    },
    "xLSTM": BASE | {
        "hidden_size": 128, "num_heads": 4, "num_blocks": 2, "chunk_size": 16,
        "output_logit_soft_cap": 2.0, "autocast_kernel_dtype": "float32",
    },
}  # fmt: skip
SINGLE = ("XGLM", "xLSTM")  # these know no float64


# ---------- layers that change behind some number of tokens

AT = 16
WINDOW = {"sliding_window": AT}
ASKED = WINDOW | {"use_sliding_window": True, "max_window_layers": 1}
INDEXED = {"index_topk": AT, "index_n_heads": 32}  # many heads: of a few, scores of 0 tie
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": AT}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 16.0, 64.0]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

# By a family's name, and what it is set to where there is more than one thing.
FAR = {
    **dict.fromkeys(("Afmoe", "Cohere2", "Dots1", "Exaone4", "Gemma2", "Gemma3Text", "Gemma4Text"), WINDOW),
    **dict.fromkeys(("GptOss", "GraniteSWA", "Ministral", "Mistral", "Mixtral", "Olmo3", "Phi3"), WINDOW),
    **dict.fromkeys(("Phimoe", "Starcoder2", "VaultGemma"), WINDOW),
    **dict.fromkeys(("Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3"), ASKED),
    "Doge": {"keep_window_size": AT},
    "GPTNeo": {"window_size": AT},
    "RecurrentGemma": {"attention_window_size": AT},
    "Llama4Text": {"attention_chunk_size": AT},
    "Llama4Text floor_scale": {
        "floor_scale": AT, "attn_scale": 2.0, "no_rope_layers": [1, 0], "attn_temperature_tuning": True
    },
    "Llama longrope": {"rope_parameters": LONG},
    "Phi3 longrope": {"rope_parameters": LONG, "original_max_position_embeddings": AT},
    "Phimoe longrope": {"rope_parameters": LONG | {"short_mscale": 1.0, "long_mscale": 1.3}},
    "Llama dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": AT},
    # newer ones, which are built from usual names
    **dict.fromkeys(("Cohere2Moe", "ExaoneMoe", "Flint", "GraniteMoeSWA", "Kolibri1", "Laguna"), WINDOW),
    **dict.fromkeys(("DeepseekV4", "Dory", "Lfm3", "Mellum"), WINDOW),
    **dict.fromkeys(("AXK2", "DeepseekV32", "GlmMoeDsa", "HYV4"), INDEXED),
    "InklingText": {"sliding_window_size": AT},
    "Ministral3": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": AT,
        "llama_4_scaling_beta": 0.5,
    }},
}  # fmt: skip
USUAL_NAMES = NARROW | EXPERTS | GROUPED | LATENT | {
    "dense_intermediate_size": 48, "d_rel": 8, "hc_mult": 2, "index_head_dim": 8, "max_window_layers": 1,
    "num_layers": 2, "num_local_experts": 4, "num_shared_experts": 1, "o_groups": 2, "o_lora_rank": 8,
    "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "use_sliding_window": True,
}  # fmt: skip


def far(name, dtype=torch.float32):
    """A small model of `FAR`."""
    lm = small(name.split()[0], dtype, **FAR[name])
    for parameter, x in lm.named_parameters():
        # scores that choose tokens must not tie, as those of zeros or of large numbers do
        if parameter.endswith(".A"):
            x.data = torch.linspace(-1, 1, x.numel(), dtype=x.dtype)
        if parameter.endswith("dt_proj.weight"):
            x.data *= 0.1
    return lm


def config(kind, **changes):
    """The config of a small model of that family."""
    import transformers

    cls = getattr(transformers, f"{kind}Config")
    known = FAMILIES.get(kind)
    if known is None:
        usual = cls()
        known = {name: value for name, value in USUAL_NAMES.items() if hasattr(usual, name)}
    return cls(**known | changes)


def small(kind, dtype=torch.float64, std=0.3, **changes):
    """A small model with weights that make its log-probs differ; `std` 0 keeps those that it starts from."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = transformers.AutoModelForCausalLM.from_config(config(kind, **changes))
        if dtype == torch.float64 and lm._can_set_experts_implementation():
            lm.set_experts_implementation("eager")  # a product of groups knows no float64
        for p in lm.parameters():
            if std and p.dim() >= 2:
                p.data.normal_(0, std)
    return lm.to(dtype).eval()


def seeing():
    """A small vision-language model: its text model has an MLP whose layers are named as in its tower."""
    import transformers

    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text = USUAL | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 32, "out_hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 48}
    config = transformers.Qwen2_5_VLConfig(text_config=text | {"rope_scaling": rope}, vision_config=vision)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def hearing():
    """A small audio-language model: a tower and a projector beside its text model."""
    import transformers

    audio = transformers.Qwen2AudioEncoderConfig(
        d_model=32, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=16,
    )  # fmt: skip
    text = transformers.Qwen2Config(**USUAL)
    config = transformers.Qwen2AudioConfig(text_config=text, audio_config=audio)
    return transformers.Qwen2AudioForConditionalGeneration(config)
