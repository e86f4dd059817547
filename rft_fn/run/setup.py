"""What the loop of a training script works with, checked, loaded and laid out in one record.

A `Setup` has data and functions of one call. It holds no loop over steps, no loss, no advantage and no state
that changes; the model's state and the loop's are arguments and results. A reference that follows the policy
moves in place.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from rft_fn import ckpt, collect, metric, model, reward, tree
from rft_fn.collect import AsyncSampler, Batch
from rft_fn.optim import Schedule
from rft_fn.reward import early
from rft_fn.run import options
from rft_fn.run.reward_task import Task, evaluate, judge
from rft_fn.run.rollout_engine import Push, saved_if_lost
from rft_fn.run.run_folder import Run, checkpoint, final_weights, restore_latest
from rft_fn.types import Apply, Experience, Rollout, Sampling, Strategy, TokenOut, TrainState

__all__ = ["Model", "Reference", "Setup"]

LoopState = TypeVar("LoopState", bound=NamedTuple)  # of a script, with a field `step`


def _at_first_step(state: TrainState) -> TrainState:
    """Return the state of another run as that of a new one: its moments keep the count of their updates."""
    return tree.replace(state, step=0, skipped=0)


class Model(NamedTuple):
    """A model that is trained."""

    module: nn.Module
    apply: Apply
    state: TrainState  # at the start of the run
    schedule: Schedule  # its learning rate as a function of the updates done


class Reference(NamedTuple):
    """The model that a KL is to: the initial one, or one that follows the policy."""

    apply: Apply
    params: Any  # None where they are the policy's, whose adapters are off


@dataclass(frozen=True)
class Setup:
    """What the loop of a script works with."""

    cfg: Any  # the Config of the script, of the subjects that it inherits, with the number of steps decided
    st: Strategy
    run: Run
    task: Task
    policy: Model
    critic: Model | None
    reference: Reference | None
    sampling: Sampling | None  # None, like the next two, where nothing is sampled
    samples: AsyncSampler | None
    send: Push | None  # of the weights to the engine
    greedy: bool = False  # whether each prompt has a greedy answer too

    def restore(self, state: Any, loop: LoopState) -> tuple[Any, LoopState]:
        """Return (state, loop) of the newest checkpoint, or the given ones where there is none.

        In a new run with --from-checkpoint the state is that of the other run's checkpoint, at step 0.
        Donates `state`. `loop` is a NamedTuple of everything else that a run goes on from; `loop.step` steps
        are done. The files of the run are cut back to them. A reference that follows the policy is loaded in
        place.
        """
        followed = self._followed()
        source = options.of(options.Optimizer, self.cfg).from_checkpoint
        if source and ckpt.latest(self.run.checkpoints) is None:
            state, _ = self.st.restore(source, state)
            state = tree.map(_at_first_step, state, is_leaf=lambda x: isinstance(x, TrainState))
        state, found = restore_latest(self.st, self.run, state, loop._asdict() | followed)
        self.run.resume(found["step"])
        if followed.get("reference") is not None and found["reference"] is not None:
            model.assign(followed["reference"], found["reference"])  # a sharded model takes only its own
        return state, loop._replace(**{name: found[name] for name in loop._fields})

    def _followed(self) -> dict[str, Any]:
        """Return what a checkpoint has of the reference: its parameters where it follows the policy."""
        if not isinstance(self.cfg, options.Reference):
            return {}
        if self.reference is None or not self.cfg.ref_every:
            return {"reference": None}
        return {"reference": self.reference.params}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the seconds of the block under `name` in the step's row of timing.jsonl."""
        return self.run.phase(name)

    @contextmanager
    def sampling_block(self, name: str = "generate") -> Iterator[None]:
        """Count the seconds of the block, and save the last whole step if the engine is lost in it."""
        with self.run.phase(name), saved_if_lost(self.run):
            yield

    @property
    def source(self) -> collect.Source:
        """Return where a collector draws its prompts, and what answers and judges them."""
        assert self.samples is not None and self.sampling is not None, "nothing is sampled"
        starts = early.starts_early(self.task.score)
        return collect.Source(
            strategy=self.st,
            samples=self.samples,
            dataset=self.task.dataset,
            judge=self.judge,
            sampling=self.sampling,
            seed=self.cfg.seed,
            steps=self.cfg.steps,
            sampling_block=self.sampling_block,
            begin=partial(early.begin, self.task.score, self.task.tokenizer) if starts else None,
        )

    def collector(self) -> collect.Collector:
        """Return the collector that the options ask for."""
        cfg, how = options.of(options.Rollouts, self.cfg), options.of(options.Collect, self.cfg)
        return collect.collector(
            self.source,
            prompts=cfg.prompts,
            group=cfg.group,
            ahead=cfg.ahead,
            partial_budget=cfg.partial,
            rounds=how.rounds,
            curriculum=how.curriculum,
            floor=how.curriculum_floor,
            prompt_shares=how.curriculum_by == "prompt",
            greedy=self.greedy,
            mask_truncated=how.mask_truncated,
        )

    def judge(self, rollout: Rollout, prompts: Sequence[Any], step: int) -> reward.Judged:
        """Return the rewards of responses, the same on every rank."""
        with self.run.phase("judge"):
            return judge(self.cfg, self.st, self.task, rollout, list(prompts), step=step)

    def score(
        self,
        by: Model | Reference,
        state: TrainState,
        batch: Rollout | Experience,
        *,
        fields: Sequence[str] = ("logp",),
        unit: int = 1,
    ) -> TokenOut:
        """Return what a model says of a batch, without gradient: the policy, the critic or the reference.

        `state` is of the policy or of the critic. `unit` consecutive rows share a pack, as in `st.shard`. A
        reference chooses its experts by itself, whatever the sampler chose.
        """
        if isinstance(by, Reference):
            batch = tree.replace(batch, routing=None)
        own = by.params if isinstance(by, Reference) else None
        params = state.params if own is None else own
        with self.run.phase("score"):
            return self.st.score(by.apply, params, batch, self.cfg.budget, fields=fields, unit=unit)

    def push(self, state: TrainState, *, version: int) -> None:
        """Send the weights of the policy to the engine, as those after `version` steps."""
        assert self.send is not None, "nothing is sampled"
        with self.run.phase("sync"):
            self.send(state, version=version)

    def evaluation(self, step: int) -> dict[str, float]:
        """Return the mean rewards of greedy answers to unseen prompts after `step` steps; {} if not due.

        It is due at both ends of the run, and every --eval-every.
        """
        if step != self.cfg.steps and step % self.cfg.eval_every:
            return {}
        assert self.samples is not None, "nothing is sampled"
        return evaluate(self.cfg, self.st, self.run, self.task, self.samples.engine, step=step)

    def report(self, step: int, batch: Batch, learned: Tensor, values: Mapping[str, float]) -> float:
        """Write the metrics of a step and some of its responses, and return the mean reward.

        `values` are joined by what one reads of the rollout, and of its rewards; `learned` [N, G] are the
        rewards after shaping.
        """
        of_rollout = metric.rollout(batch.rollout, learned)
        values = metric.told(values) | of_rollout | reward.means(batch.judged, "reward")
        if self.samples is not None:
            self.run.beside("engine", self.samples.busy())
            values |= self.samples.accepted()
        self.run.write(step, values, tokens=int(batch.rollout.length.sum()))
        self.run.trajectories(step, batch.prompts, batch.rollout, batch.judged)
        every = self.cfg.rollouts_every
        if every and step % every == 0:
            self.run.rollout(step, batch.rollout, batch.judged.reward)
        return values["reward/mean"]

    def checkpoint(
        self,
        state: Any,
        loop: NamedTuple,
        *,
        score: float | None = None,
        collector: collect.Collector | None = None,
    ) -> None:
        """Save the state and the loop when it is time, and stop where a signal asked for that.

        With a `collector` its rollouts under way are finished for the checkpoint, and saved with it.
        """

        parts = loop._asdict() | self._followed()

        def whole() -> Mapping[str, Any]:
            if collector is None:
                return parts
            return {**parts, "collect": collector.save(parts["collect"])}

        best = self.cfg.best if isinstance(self.cfg, options.ScoredRun) else 0
        checkpoint(self.cfg, self.st, self.run, parts["step"], state, whole, score=score, best=best)

    def finish(self, state: TrainState, *, merge: bool = True) -> None:
        """Save the model that came out, and end the run, its engine and its processes.

        Adapters become part of it with `merge`, unless --no-lora-merge asks for a folder of them.
        """
        merge = merge and self.cfg.lora_merge
        how = options.of(options.Updates, self.cfg)
        weights = final_weights(self.st, state, average=how.ema > 0)
        folder = self.run.folder / "model"
        self.st.save_pretrained(folder, self.policy.module, self.task.saved, weights, merge=merge)
        if self.samples is not None:
            self.samples.close()
        if self.task.score is not None:
            self.task.score.close()
        self.run.finish()
        self.st.close()
