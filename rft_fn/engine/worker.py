"""The part of a vLLM server that takes weights from a folder.

`--worker-extension-cls rft_fn.engine.worker.WeightsFromFolder`; the trainer does not import it.
"""

from typing import Any

from rft_fn.engine import weight_folder

__all__ = ["WeightsFromFolder"]


class WeightsFromFolder:
    """Methods that vLLM adds to its worker, to be called by `/collective_rpc`."""

    # names start with rft_, because they stand among those of the worker
    rft_usual: frozenset[str] | None = None  # modules that stay short in a whole load

    def rft_describe(self: Any) -> dict[str, Any]:
        """The device, and whether memory can be given back."""
        config = self.vllm_config
        device = str(config.device_config.device_type)
        return {"device": device, "sleep": bool(config.model_config.enable_sleep_mode) and device != "cpu"}

    def rft_load(self: Any, folder: str) -> dict[str, Any]:
        """Load the tensors of a folder, and count what arrives in each module.

        Returns the names taken, and the modules that got fewer elements than in the first load (padding,
        rotary tables and scales always do): `{"names": n, "short": ["layers.0.qkv_proj 512/768"]}`, or
        `{"error": text}`. An exception would leave the server with half of its weights and no reply.
        """
        try:
            names, short = self.rft_count(folder)
        except Exception as error:
            return {"error": " ".join(f"{type(error).__name__}: {error}".split())}

        # the first load is complete: the trainer has checked its names against the model's
        if self.rft_usual is None:
            self.rft_usual = frozenset(short)
        return {"names": names, "short": [short[name] for name in short.keys() - self.rft_usual]}

    def rft_count(self: Any, folder: str) -> tuple[int, dict[str, str]]:
        """(tensors, {module: elements loaded / all} of each that is short) of a load."""
        from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.model_loader.reload import layerwise  # pyright: ignore[reportMissingImports]

        names = 0

        def counted() -> Any:
            nonlocal names
            for name, x in weight_folder.read(folder):
                names += 1
                yield name, x

        runner = self.model_runner
        model = runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            layerwise.initialize_layerwise_reload(model)
            model.load_weights(counted())
            short = {}
            for name, module in model.named_modules():
                info = layerwise.get_layerwise_info(module)
                if info.can_load() and info.load_numel < info.load_numel_total:
                    short[name] = f"{name} {info.load_numel}/{info.load_numel_total}"
            layerwise.finalize_layerwise_reload(model, runner.model_config)
        runner.reset_encoder_cache()
        runner.reset_mm_cache()
        return names, short
