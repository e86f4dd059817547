"""Registers the backend `rft` of weight transfer with vLLM.

A server is started with `--weight-transfer-config '{"backend": "rft"}'` to have it. vLLM calls `register`
in each of its processes, by the entry point `vllm.general_plugins` of the wheel.
"""

__all__ = ["register"]


def register() -> None:
    """Add the backend to vLLM's registry, where this version has one; once."""
    try:
        from vllm.distributed.weight_transfer import factory  # pyright: ignore[reportMissingImports]

        factory.WeightTransferEngineFactory.register_engine(
            "rft", "rft_fn.engine.vllm.transfer_backend", "TransferBackend"
        )
    except (ImportError, AttributeError, ValueError):
        pass  # an older vLLM, or there already
