"""Modules and optimizers as a config asks for them, before the first step."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rft_fn import model as model_lib
from rft_fn import optim, tree
from rft_fn.model import blocks
from rft_fn.model.residence import Residence
from rft_fn.strategy import placing
from rft_fn.strategy.config import StrategyConfig
from rft_fn.types import Sampling, TrainState, Transform

__all__ = ["cast", "compile_blocks", "masters", "optimizer", "start", "wrap_for_training"]

NARROW = (torch.bfloat16, torch.float16)


def masters(config: StrategyConfig, params: Mapping[str, Tensor]) -> bool:
    """Return whether the optimizer has float32 master weights.

    It does with use_mp_opt, and by default for parameters in 16 bits. ValueError for 16 bits without
    masters: a learning rate of 1e-6 moves no bfloat16 weight above 5e-4.
    """
    narrow = [name for name, p in params.items() if p.dtype in NARROW]
    if narrow and config.use_mp_opt is False and not config.bf16:
        raise ValueError(
            f"use_mp_opt, bf16: expected one of them for {narrow[0]} in {params[narrow[0]].dtype}, got "
            "neither: its updates would be rounded away; leave out use_mp_opt for float32 masters, or set "
            "bf16 for float32 parameters"
        )
    return bool(config.use_mp_opt or (narrow and not config.bf16))


def optimizer(tx: Transform, config: StrategyConfig, params: Mapping[str, Tensor]) -> Transform:
    """Wrap `tx` as the config requests: clip before it, and step float32 masters of 16-bit `params`."""
    if config.max_norm:
        tx = optim.chain(optim.clip_by_global_norm(config.max_norm), tx)
    if masters(config, params):
        tx = optim.master_weights(tx)
    return tx


def cast(module: nn.Module, config: StrategyConfig) -> nn.Module:
    """Cast a module: to bfloat16 with use_mp_opt, to float32 with bf16, else not."""
    if config.use_mp_opt:
        return module.to(torch.bfloat16)
    return module.float() if config.bf16 else module


def wrap_for_training(
    config: StrategyConfig,
    module: nn.Module,
    *,
    sampling: Sampling | None = None,
    entropy: bool = False,
    aux: bool = False,
) -> nn.Module:
    """Call `model.wrap_for_training` with the options of the config."""
    return model_lib.wrap_for_training(
        module,
        sampling=sampling,
        entropy=entropy,
        aux=aux,
        fused=config.fused_linear_logprob,
        chunk_size=config.chunk_size,
        fast_linear=config.fast_linear,
        share_prefixes=config.share_prefixes,
    )


def compile_blocks(config: StrategyConfig, root: nn.Module) -> None:
    """Compile the decoder blocks of a bound module, if the config requests it.

    To be called after `reader.detect_packing`, so that its short forwards are not compiled.
    """
    if config.compile_blocks:
        blocks.compile_blocks(root)


def start(
    params: tree.Named, tx: Transform, config: StrategyConfig, module: nn.Module, residence: Residence
) -> TrainState:
    """Return the state before the first update; ValueError for a module without trainable parameters."""
    if not params:
        raise ValueError("module: expected trainable parameters, got none with requires_grad")
    tx = optimizer(tx, config, params)
    opt = tx.init(params)
    state = TrainState(params=params, opt=opt, step=0, tx=tx, module=module, residence=residence)
    return placing.move_opt(state, "cpu") if config.adam_offload else state
