"""Holds the engine of transformers, in this process.

| file | what it is about |
|---|---|
| engine | the functions of an engine over a model: sample, score, load, sleep |
| sampler | continuous batching: prompts are prefilled as rows end, and rows decode by their own streams |
| row_batch | the rows that decode together: prefill, decode steps, their part of the KV cache |
| fixed_steps | decode steps of fixed shapes, which a CUDA graph replays |
| fused_steps | one step by fused kernels, of models that are built as Llama is |
| step_memory | their tensors and graphs, from one call to the next |
| shared_prefix | attention that reads the KV cache of a prompt once for all of its samples |
| buffers | the KV cache of each row's own tokens, with room for more tokens and rows |
| cache_rows | the rows of a model's cache, whatever it holds: selected, joined, compared |
| row_media | the media of rows, as the arguments that the model takes |
| row_scores | log-probs of rows: the decoder's forward, and its head over a few tokens at a time |
| draws | tokens drawn from logits by given uniform numbers |
| probe | which of this a model's cache supports, found by trying |
"""

from rft_fn.engine.hf.engine import build, check_config, hf

__all__ = ["build", "check_config", "hf"]
