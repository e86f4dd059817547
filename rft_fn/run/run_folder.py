"""The folder of a run: what it writes, and what the same command finds there when it starts again.

runs/NAME/config.json         the options, of the last start that changed some; the date of the first start,
                              digests of the data, the user's files and the tokenizer, and the script
          manifest.json       digests of every file that was read before the first step: weights, code
          rows.bin            8 bytes of each row of the data, which tell the row that has changed
          overrides.jsonl     what changed the mathematics in mid-run, with the step of the change
          metrics.jsonl       a row per step, a function of only the config: a resumed run's is equal
          timing.jsonl        seconds, in all and by phase, tokens/s and peak memory
          trajectories.jsonl  sampled responses with their rewards, to be read
          distributions.jsonl   quantiles of the lengths and rewards of each step
          tokens.jsonl          single tokens of some responses, and what the loss did to them
          rollouts/             all responses of some steps, with --rollouts-every
          samples.png           responses next to the images or spectrograms that they are about, if any
          reliability.png       how often the predictions of a reward model come true on held-out rows
          curve.png  lengths.png  phases.png  checkpoints/
          model/  critic/       what came out, each with a card in its README.md
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

import rft_fn
from rft_fn import ckpt, dist, limits, optim
from rft_fn.ckpt.folder import read_meta
from rft_fn.data.template_variables import fix_day
from rft_fn.metric import Calibration
from rft_fn.reward import Judged
from rft_fn.run import claim, earlier_run, options, plot, samples, signals, symptoms, tracking
from rft_fn.run.card import save_card
from rft_fn.run.claim import Claim, Inputs
from rft_fn.run.files import append_row, defaults_of, jsonable
from rft_fn.run.mirror import Mirror
from rft_fn.run.pictures import Pictures
from rft_fn.run.progress import Progress, Timing
from rft_fn.run.rollout_files import write_rollout
from rft_fn.types import Rollout, Session, Strategy, TrainState

__all__ = ["Run", "checkpoint", "final_weights", "restore_latest"]

_MODELS = ("model", "critic")  # folders that a script leaves in that of its run


# ---------- the folder of a run


class Run:
    """The folder of a run. On rank 0 it writes; on other ranks it does nothing."""

    def __init__(
        self,
        folder: str | Path,
        config: Any,
        *,
        total: int,
        rank: int = 0,
        trackers: Sequence[str] = (),
        project: str = "rft_fn",
        name: str = "",
        free: Sequence[str] = (),
        override: bool = False,
        mirror: str = "",
        log_dir: str | Path = "",
        plot_every: int = 0,
        session: Session | None = None,
        inputs: Inputs | None = None,
    ):
        """Make the folder and lock it, or continue the run in it.

        A run may continue with other values of the options that are `limits.Free` in the config's class or
        named in `free`; with `override` any may change, and what changed is noted in overrides.jsonl.
        Pictures and tensorboard files go to `log_dir`, or to the folder; a histogram of response lengths
        every `plot_every` steps (0: only at the end). `project` and `name` are what trackers show. Dumps of
        gradients that are not finite go to the folder too, with the `session` of the run's strategy.
        `inputs` are the data, the code, and the tokenizer of the run. `mirror` is an address that gets the
        checkpoints and the other files, after `mirror.fetch`.

        ValueError on every rank, before anything is computed, for a folder that cannot be written, that
        another process is using, or that holds another run, and for a tracker that is not installed.
        """
        self.folder = Path(folder)
        self.total = total
        self.main = rank == 0
        self._watch = nullcontext
        self._doing: Callable[[str], AbstractContextManager[Any]] = nullcontext
        if session is not None:
            session.set_dump_dir(self.folder)
            self._watch = session.watch
            self._doing = session.phase
        self.config = jsonable(config)

        may_change = {"out", "override", *free}
        defaults: dict[str, Any] = {}
        if dataclasses.is_dataclass(config):
            may_change |= limits.free(type(config))
            defaults = defaults_of(config)
        made_by = {"script": _script_of(config), "rft_fn": rft_fn.__version__}
        self._override = override
        self._claim = Claim(
            self.folder, self.config, may_change, defaults=defaults, inputs=inputs, made_by=made_by
        )
        self._timing = Timing()
        self._progress = Progress(self.folder.name, total)
        self._pictures = Pictures(self.folder, Path(log_dir or folder), every=plot_every, config=self.config)
        self._trackers: list[tracking.Track] = []
        self._mirror: Mirror | None = None
        self._reached = 0  # whole steps
        self._save: Callable[[], None] | None = None  # what saves them, where they are not saved
        self._rewards: list[float] = []  # of all steps, for the curve at the end
        self._warnings = symptoms.Warnings()

        # ranks with other options would compute other things, or wait for each other for ever
        with self._watch():
            lines = dist.differences({"config": json.dumps(self.config, default=str)})
        if lines:
            raise ValueError(f"ranks: expected the same config on all: {lines[0]}")

        def begin() -> None:
            tracking.check(trackers)
            self._claim.take(override=override)
            place = self._pictures.folder
            place.mkdir(parents=True, exist_ok=True)
            self._trackers = tracking.start(trackers, self.folder, place, self.config, project, name)
            self._mirror = Mirror(self.folder, mirror) if mirror else None

        self._on_rank_0(begin)

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the checkpoints."""
        return earlier_run.checkpoints(self.folder)

    def resume(self, step: int) -> None:
        """Cut the files back to the checkpoint that the run continues from: `step` steps are done.

        All files that the steps are made of are read by now: those that differ from the files of the steps
        before are told. ValueError for other weights, unless the run was opened with `override`, and if
        there were checkpoints and none is left: the rows of the run are not wiped for that.
        """

        def continue_from() -> None:
            self._claim.compare_files(step, override=self._override)
            earlier_run.cut_back(self.folder, step)
            self._claim.note_changes(step)
            if step:
                print(f"{self.folder}: continuing after step {step}", flush=True)
            path = self.folder / "metrics.jsonl"
            rows = plot.read_metrics(path) if path.exists() else []
            if missing := earlier_run.lacking(rows, step):
                print(f"warning: {self.folder}: metrics.jsonl has lost {missing}", flush=True)
            if rows:
                found = [row["reward/mean"] for row in rows if "reward/mean" in row]
                self._rewards = [math.nan if reward is None else reward for reward in found]
                self._warnings = symptoms.Warnings(rows)

        self._on_rank_0(continue_from)
        self._reached = step
        signals.enter_steps()
        self._timing = Timing()
        self._progress.begin(step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under `name` in the step's row of timing.jsonl.

        A line about a lost process has the name too, where no block within has one of its own.
        """
        with self._timing.phase(name), self._doing(name):
            yield

    def beside(self, name: str, seconds: float) -> None:
        """Note the seconds of work that ran parallel to the phases, in the step's row of timing.jsonl."""
        self._timing.beside[name] = seconds

    def write(self, step: int, metrics: Mapping[str, float], *, tokens: int = 0) -> None:
        """Write one step's metrics to every place; `tokens` were processed since the last call.

        Non-finite values become null. The seconds of a phase after this call (a checkpoint's) are in the row
        of the next step. ValueError where the folder was deleted during the run.
        """
        if not self.main:
            return
        self._check_folder()
        earlier_run.mark_saved(self.folder)
        timing = self._timing.row(tokens)

        # JSON has no NaN
        row: dict[str, float | None] = {name: float(value) for name, value in metrics.items()}
        row |= {name: None for name, value in metrics.items() if not math.isfinite(value)}
        lines, notes = self._warnings.note(row)
        row |= notes
        append_row(self.folder / "metrics.jsonl", {"step": step, **row})
        append_row(self.folder / "timing.jsonl", {"step": step, **timing})
        for track in self._trackers:
            track(step, {**metrics, **notes, **{f"time/{k}": v for k, v in timing.items()}})

        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        self._progress.show(step, metrics, timing)
        for line in lines:
            self._progress.say(line)

    def trajectories(
        self,
        step: int,
        prompts: Sequence[Any],
        rollout: Rollout,
        judged: Judged,
        *,
        count: int = 4,
        split: str = "train",
    ) -> None:
        """Write the first response to every prompt of the first `count`, with its reward, as JSON lines.

        Quantiles of the lengths and rewards of all responses go to distributions.jsonl, and the lengths are
        kept for the picture. Rows of another split than "train", such as an evaluation's, carry its name, and
        are not in the picture. With a held reward there is also the response at the 99th percentile of the
        rewards.
        """
        if not self.main:
            return
        if split == "train":
            self._pictures.note_lengths(step, rollout.mask.sum(-1).tolist())
            self._pictures.note_samples(step, prompts, judged, count=count)
            if step + 1 == self.total:  # before its checkpoint: a run that continues from there has none
                self._pictures.draw_responses()
            spread = samples.distribution(step, rollout, judged)
            append_row(self.folder / "distributions.jsonl", spread)
        top = samples.top_rows(step, prompts, judged) if split == "train" else []
        for row in [*samples.rows(step, prompts, judged, count=count, split=split), *top]:
            append_row(self.folder / "trajectories.jsonl", row)

    def rollout(self, step: int, rollout: Rollout, reward: Tensor) -> None:
        """Write all responses of a step, with their rewards [N, G], to rollouts/step_N.safetensors."""
        if self.main:
            write_rollout(self.folder / "rollouts" / f"step_{step:08d}.safetensors", rollout, reward)

    def tokens(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of single tokens, one JSON line each, as `TokenLog` makes them."""
        if self.main:
            for row in rows:
                append_row(self.folder / "tokens.jsonl", row)

    def reliability(self, found: Calibration) -> None:
        """Keep how often predictions on held-out rows come true, for reliability.png."""
        if self.main:
            self._pictures.note_reliability(found)

    def reach(self, step: int, save: Callable[[], None] | None) -> None:
        """Note that `step` steps are done, and what would save them; None if they are saved."""
        self._reached = step
        self._save = save

    def save_now(self) -> int:
        """Save the last whole step if it is not yet, before its state is updated; return its number."""
        if self._save is not None:
            self._save()
            self._save = None
        return self._reached

    def stopping(self) -> bool:
        """Return whether a signal asked any process to stop.

        The same on every rank, which all ask once a step.
        """
        with self._watch():
            return bool(signals.stopping())

    def stop(self, step: int) -> None:
        """End the process after its last checkpoint, of `step` steps, by raising `Stopped`."""
        self._close()
        self._send_rest()
        where = f" after step {step}; the same command continues from there"
        raise signals.Stopped(signals.asked(), where)

    def finish(self) -> None:
        """Draw the pictures, write the cards of the models, show the curve, and unlock the folder."""
        if self.main:
            self._check_folder()
            for model in (self.folder / name for name in _MODELS):
                if model.is_dir():
                    save_card(model, self.folder)
        self._close()
        fix_day(None)
        if not self.main:
            return
        self._pictures.draw()
        if len(self._rewards) > 1:
            last = self._rewards[-10:]
            print(plot.terminal_curve(self._rewards, title="reward"))
            print(f"reward: {sum(last) / len(last):.3f}, the mean of the last {len(last)} steps")
        rows = [name for name in ("metrics.jsonl", "trajectories.jsonl") if (self.folder / name).exists()]
        print(f"run: {self.folder}  ({', '.join(rows)})  {self._pictures.curve}")
        print(f"page of all of it: rft report {self.folder}", flush=True)
        self._send_rest()

    def _check_folder(self) -> None:
        """Raise ValueError for a folder that was deleted during the run, or all rows in it."""
        path = self.folder / "metrics.jsonl"
        claim.check(self.folder, whole=not self._reached or path.exists())

    def _send_rest(self) -> None:
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None

    def _close(self) -> None:
        self._progress.stop()
        if self.main:
            earlier_run.mark_saved(self.folder)
            self._claim.release()

    def _on_rank_0(self, act: Callable[[], None]) -> None:
        """Call `act` on rank 0 only, and raise on every rank what went wrong there."""
        error: Exception | None = None
        text: str | None = None
        if self.main:
            try:
                act()
            except (ValueError, OSError) as found:
                error = found
                text = str(found)
        with self._watch():
            line = dist.all_gather_object(text)[0]
        if error is not None:
            raise error
        if line is not None and not self.main:
            raise ValueError(line)


def _script_of(config: Any) -> str:
    """Return the name of the file that defines the class of a config; "" where there is none."""
    module = sys.modules.get(type(config).__module__)
    return Path(getattr(module, "__file__", None) or "").name if dataclasses.is_dataclass(config) else ""


# ---------- checkpoints of a run: restore the newest, save when it is time, and the weights at the end


def restore_latest(st: Strategy, run: Run, state: Any, extra: Any = None) -> tuple[Any, Any]:
    """Return (state, extra) of the run's newest checkpoint, or the given ones where it has none.

    `state` is donated. A part of `extra` that an older checkpoint does not have is the given one; one of
    rft_fn 0.1 has the parts of a loop side by side, or none.
    """
    saved = ckpt.latest(run.checkpoints)
    if saved is None:
        return state, extra
    if extra is None or not _is_flat(saved):
        known = extra if extra is None else {name: extra[name] for name in _known(saved, extra)}
        state, found = st.restore(saved, state, known)
        return state, found if extra is None else {**extra, **found}
    state, flat = st.restore(saved, state)
    return state, {**extra, **_nested(state, flat, extra)}


def _known(saved: Path, extra: Mapping[str, Any]) -> list[str]:
    """Return the parts of a loop that a checkpoint has, in the order of the loop."""
    with suppress(ValueError, KeyError):  # a damaged one is named where it is restored
        keys = read_meta(saved)["extra"]["keys"]
        return [name for name in extra if name in keys]
    return list(extra)


def _is_flat(saved: Path) -> bool:
    """Return whether a checkpoint has the parts of a loop side by side, or no loop at all."""
    with suppress(ValueError):  # a damaged one is named where it is restored
        names = read_meta(saved)["names"]
        return "extra/step" not in names or "extra/moments/count" in names
    return False


def _nested(state: Any, flat: dict[str, Any] | None, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loop of a checkpoint of rft_fn 0.1 as one tree."""
    if flat is None:
        return {**like, "step": state.step}
    collecting = {name: flat.pop(name, None) for name in ("ahead", "waiting", "curriculum")}
    return {**flat, "shaping": flat.pop("moments"), "collect": collecting}


def final_weights(st: Strategy, state: TrainState, *, average: bool) -> Iterable[tuple[str, Tensor]]:
    """Return full tensors by name: the weights to save at the end, or the average the optimizer keeps."""
    if average:
        return optim.ema_params(state.opt).items()
    return st.export(state)


def checkpoint(
    cfg: options.Run,
    st: Strategy,
    run: Run,
    step: int,
    state: Any,
    extra: Callable[[], Any],
    *,
    score: float | None = None,
    best: int = 0,
) -> None:
    """Save the state after `step` steps when it is time, and stop if a signal asked for that.

    It is time every `save_every` steps, at the end of the run, and before the process stops, which raises
    `Stopped`. Only the newest `keep` checkpoints stay, and the `best` ones by `score`. `extra` is called for
    what else a checkpoint holds, when one is written. All ranks call it.
    """

    def save(*, wait: bool = True) -> None:
        with run.phase("save"):
            path = run.checkpoints / f"step_{step:08d}"
            st.save(path, state, extra(), score=score, wait=wait)
            limit = cfg.max_bytes or None
            st.rotate(run.checkpoints, keep=cfg.keep, best=best, max_bytes=limit)

    # a run that ends waits for its last files; in between they are written while training continues
    done = step == run.total
    stop = run.stopping()
    run.reach(step, save)
    if done or stop or step % cfg.save_every == 0:
        save(wait=done or stop)
        run.reach(step, None)

    if stop and not done:
        run.stop(step)
