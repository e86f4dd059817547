"""vLLM with a small Qwen2-Audio: the tokens of the hf engine, and its log-probs, from the same tensors."""

import os

import sees_and_hears
import tiny
import torch
from inprocess import needs_vllm
from safetensors.torch import load_file, save_file
from sees_and_hears import AUDIO, FAMILIES, TEXT

import rft_fn as rft
from rft_fn import engine
from rft_fn.engine import prompt_media, requests
from rft_fn.engine.prompt_media import Sent
from rft_fn.engine.requests import Stop
from rft_fn.engine.vllm import sampler as media
from rft_fn.engine.vllm.sampler import Asked, Sampler
from rft_fn.environment.tiny_models import new_tokenizer

pytestmark = needs_vllm

FRAMES = 3000  # of a spectrogram, which vLLM wants whole
TOK = tiny.tokenizer()


def make():
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    audio = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    audio |= {"num_mel_bins": 8, "max_source_positions": 1500, "model_type": "qwen2_audio_encoder"}
    text = TEXT | {"model_type": "qwen2", "hidden_size": 128}  # heads of a width that vLLM has on a CPU
    return Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_index=AUDIO)
    )


def mel(*draw):
    """An audio of the tests' Qwen2-Audio, with silence up to FRAMES."""
    tensors, places = sees_and_hears._mel(*draw)
    more = FRAMES - tensors["input_features"].shape[-1]
    return {name: torch.nn.functional.pad(x, (0, more)) for name, x in tensors.items()}, places


def write(lm, folder):
    """The model with its processor, by the names of tensors that vLLM has."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    tok = new_tokenizer()
    fill = [f"<x{i}>" for i in range(len(tok), AUDIO)]
    tok.add_tokens([*fill, "<|AUDIO|>", "<x>", "<y>", "<|audio_bos|>", "<|audio_eos|>"])
    lm.save_pretrained(folder)
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=8), tok).save_pretrained(folder)
    tok.save_pretrained(folder)
    file = folder / "model.safetensors"
    named = load_file(file)
    plain = {name.replace("model.model.", "model."): x.clone() for name, x in named.items()}
    save_file(plain, file, metadata={"format": "pt"})


def test_an_audio_is_heard_as_here(tmp_path, monkeypatch):
    import vllm

    monkeypatch.setitem(os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    family = FAMILIES["Qwen2Audio"]._replace(make=make, items={"audio": mel})
    lm = family.build(torch.float32)
    write(lm, tmp_path)
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "generation_config": "vllm"}
    options |= {"logprobs_mode": "processed_logprobs", "kv_cache_memory_bytes": 1 << 26, "block_size": 32}
    options |= {"skip_mm_profiling": True, "mm_processor_cache_gb": 0, "enable_chunked_prefill": False}
    llm = vllm.LLM(str(tmp_path), max_num_batched_tokens=4096, **options).llm_engine

    # one audio, none, two, and words alone
    prompts = []
    for i, count in enumerate((1, 0, 2, 0)):
        tensors, ids = family.sample(["audio"] * count, seed=i)
        prompts.append(Sent(ids, tensors, None))
    here = engine.hf(lm, TOK)
    ids = requests.token_ids(prompts)
    shown = prompt_media.read(prompts, ids)
    fields = media.fields_of(llm.vllm_config.model_config)

    def request(row):
        return media.request(lm, fields, row.prompt, row.media, torch.float32)

    sampler = Sampler(llm, torch.device("cpu"), 300.0, request)
    stop = Stop(None, requests.end_tokens(lm, TOK), ())
    keys = list(range(4))
    for sampling in (rft.Sampling(temperature=0, max_new=6), rft.Sampling(max_new=6)):
        rows = [Asked(ids[b // 2], b, 6, shown[b // 2], sampling.temperature) for b in range(8)]
        found = sampler.responses(rows, sampling, stop)
        own = prompt_media.tensors(shown)
        rollout = requests.assemble(ids, found, pad=0, version=0, media=own)
        if sampling.temperature:
            assert (here.score(rollout) - rollout.logp).abs().max() < 1e-5
            assert rollout.logp[rollout.mask].min() < -0.1
        else:
            want = here.generate(prompts, keys, n=2, sampling=sampling)
            for b, size in enumerate(want.length.tolist()):
                assert rollout.tokens[b, : rollout.length[b]].tolist() == want.tokens[b, :size].tolist()
