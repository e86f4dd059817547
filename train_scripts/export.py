"""A checkpoint as a model: a folder that transformers loads, without the optimizer that trained it.

    python train_scripts/export.py runs/grpo                 # the newest checkpoint, as runs/grpo/model
    python train_scripts/export.py runs/grpo --step 50       # or that of step 50
    python train_scripts/export.py runs/grpo --best --no-merge --out adapters
    python train_scripts/export.py runs/grpo --push-to-hub me/my-model --private

The run's config.json names the model that it started from and its adapters. The folder has a model card.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

import rft_fn as rft
from rft_fn.limits import Count, Filled
from rft_fn.run.options import Options


@dataclass(frozen=True)
class Config(Options):
    """The options of an export."""

    run: tyro.conf.Positional[Filled]  # the folder of the run
    step: Count | None = None  # the checkpoint of this step; None is the newest
    best: bool = False  # the checkpoint with the highest reward
    ema: bool | None = None  # the moving average of the weights; None is what the run itself would save
    merge: bool = True  # merge adapters into the model; if not, they are saved alone
    critic: bool = False  # the critic of a ppo.py run instead of the actor
    out: str = ""  # the folder to write; if empty, RUN/model, or RUN/model_STEP if that exists
    push_to_hub: str = ""  # also upload the folder to this repository of the hub, OWNER/NAME
    private: bool = False  # make a repository that is new a private one


def chosen(cfg: Config) -> Path:
    """The checkpoint that was asked for. ValueError if it is not there."""
    folder = Path(cfg.run) / "checkpoints"
    there = rft.ckpt.steps(folder)
    if not there:
        raise ValueError(f"run: expected checkpoints in {folder}, got none")

    # one of them by its step
    if cfg.step is not None and cfg.best:
        raise ValueError(f"step, best: expected one of them, got {cfg.step} and True")
    if cfg.step is not None:
        named = {int(path.name.removeprefix("step_")): path for path in there}
        if cfg.step not in named:
            raise ValueError(f"step: expected one of {', '.join(map(str, named))}, got {cfg.step}")
        return named[cfg.step]

    # the newest, or the one with the highest reward
    if not cfg.best:
        return there[-1]
    scores = {path: rft.ckpt.folder.read_meta(path)["score"] for path in there}
    scored = [path for path in there if scores[path] is not None]
    if not scored:
        raise ValueError(f"best: expected checkpoints with a reward in {folder}, got none; give --step")
    return max(reversed(scored), key=lambda path: scores[path])


def weights_of(cfg: Config, options: dict, path: Path) -> dict:
    """The weights of the checkpoint by the model's own names."""
    ema = cfg.ema
    if ema is None:
        ema = bool(options.get("ema")) and not cfg.critic

    # a checkpoint of ppo.py holds two models, of which only the actor has an average
    two = "critic" in options
    if cfg.critic and not two:
        raise ValueError(f"critic: expected off, got on: {cfg.run} has no critic")
    if cfg.ema and (cfg.critic or not options.get("ema")):
        raise ValueError(f"ema: expected off, got on: {cfg.run} has no average of these weights")
    name = "actor" if two else None  # of the state, where the checkpoint holds several
    if cfg.critic:
        name = "critic"
    try:
        return rft.ckpt.weights(path, ema=ema, name=name)
    except ValueError as error:
        if path.exists():
            raise
        raise ValueError(f"checkpoint {path}: the run has just removed it; try again") from error


def module_of(cfg: Config, options: dict):
    """The module that was trained, with the adapters that it had; its weights are replaced."""
    if cfg.critic:
        return rft.model.load_critic(options["critic"] or options["model"])
    module = rft.model.load(options["model"], quantize=options.get("quantize", ""))
    rank = options.get("lora_rank", 0)
    if not rank:
        return module
    targets = options["lora_targets"]
    return rft.model.apply_lora_configuration(module, rank, options["lora_alpha"], target_modules=targets)


def hub_repository(cfg: Config):
    """The hub's client, if the model goes there; its repository is made. ValueError if it cannot be."""
    name = cfg.push_to_hub
    if not name:
        if cfg.private:
            raise ValueError("private: expected it with --push-to-hub OWNER/NAME, got no repository")
        return None
    try:
        import huggingface_hub as hub
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ModuleNotFoundError as error:
        raise ValueError(
            "push_to_hub: expected huggingface_hub, got none; pip install huggingface_hub"
        ) from error

    # mistakes that can be seen from here
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ValueError(f"push_to_hub: expected OWNER/NAME, got {name!r}") from None
    if "/" not in name:
        raise ValueError(f"push_to_hub: expected OWNER/NAME, got {name!r}")
    if not hub.get_token():
        raise ValueError(
            "push_to_hub: expected a token of the hub, got none; run hf auth login, or set HF_TOKEN"
        )
    if why := rft.hub.unreachable():
        raise ValueError(f"push_to_hub: {why}")

    # and those that only the hub knows: a token that is not valid, or that may not write there
    api = hub.HfApi()
    try:
        api.create_repo(name, private=cfg.private, exist_ok=True)
        is_private = api.repo_info(name).private
    except Exception as error:  # its HTTP client is of one library or another
        raise ValueError(f"push_to_hub: {name} cannot be written: {error}") from error
    if cfg.private and not is_private:
        raise ValueError(f"private: {name} is there already, and public; make it private on the hub first")
    return api


def upload(api, name: str, folder: Path, message: str) -> None:
    """Upload the folder, which stays whatever becomes of that. ValueError with the command to try again."""
    try:
        url = api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except Exception as error:  # its HTTP client is of one library or another
        raise ValueError(
            f"push_to_hub: {error}; {folder} is whole, and hf upload {name} {folder} tries again"
        ) from error
    print(f"{folder} on the hub: {url}")


def main(cfg: Config) -> None:
    options = rft.run.settings(cfg.run)
    path = chosen(cfg)

    # what is there already stays as it is
    name = "critic" if cfg.critic else "model"
    out = Path(cfg.out or Path(cfg.run) / name)
    if out.exists() and not cfg.out:
        out = out.with_name(f"{name}_{path.name.removeprefix('step_')}")
    if out.exists():
        raise ValueError(f"out: {out} is there already; delete it, or give another --out")
    rft.run.check_results(out)
    api = hub_repository(cfg)

    # the weights of the checkpoint in a module like the one that was trained
    weights = weights_of(cfg, options, path)
    module = module_of(cfg, options)
    if not cfg.merge and not hasattr(module, "peft_config"):
        raise ValueError(f"merge: expected on, got off: the {name} of {cfg.run} has no adapters")
    tokenizer = None if cfg.critic else rft.model.load_tokenizer(options["model"])
    rft.model.save(out, module, tokenizer, weights.items(), merge=cfg.merge)
    step = int(path.name.removeprefix("step_"))
    rft.run.save_card(out, cfg.run, step=step)
    print(f"{path} as {out}")
    if api is not None:
        message = f"{Path(cfg.run).resolve().name}, step {step}"
        upload(api, cfg.push_to_hub, out, message)


if __name__ == "__main__":
    rft.run.cli(main, Config)
