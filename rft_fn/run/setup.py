"""What the loop of a training script works with, checked, loaded and laid out in one record.

A `Setup` has data and functions of one call. It holds no loop over steps, no loss, no advantage and no state
that changes; the model's state and the loop's are arguments and results.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from rft_fn import check, collect, metric, model, reward, reward_shaping
from rft_fn.collect import AsyncSampler, Batch
from rft_fn.optim import Schedule
from rft_fn.run import options
from rft_fn.run.off_policy import Corrected, check_gap, correct_mismatch, kl_of_updates
from rft_fn.run.reward_task import (
    Task,
    draw_examples,
    evaluate,
    judge,
    normalized_reward,
)
from rft_fn.run.rollout_engine import Push, saved_if_lost
from rft_fn.run.run_folder import Run, checkpoint, final_weights, restore_latest
from rft_fn.run.tokens import TokenLog
from rft_fn.types import Apply, Experience, LossFn, Packed, Rollout, Sampling, Strategy, TrainState

__all__ = ["Model", "Setup"]

LoopState = TypeVar("LoopState", bound=NamedTuple)  # of a script, with a field `step`


class Model(NamedTuple):
    """A model that is trained."""

    module: nn.Module
    apply: Apply
    state: TrainState  # at the start of the run
    schedule: Schedule  # its learning rate as a function of the updates done


@dataclass(frozen=True)
class Setup:
    """What the loop of a script works with."""

    cfg: Any  # the options, with the number of steps decided
    st: Strategy
    run: Run
    task: Task
    policy: Model
    critic: Model | None
    initial: tuple[Apply, Any] | None  # of the initial model; its params are None where they are the policy's
    sampling: Sampling | None  # None, like the next two, where nothing is sampled
    samples: AsyncSampler | None
    send: Push | None  # of the weights to the engine
    greedy: bool = False  # whether each prompt has a greedy answer too

    @property
    def apply(self) -> Apply:
        """Return the policy as a function of its parameters."""
        return self.policy.apply

    @property
    def steps(self) -> int:
        """Return the number of steps of the run."""
        return self.cfg.steps

    # ---------- the beginning and the end of a run

    def restore(self, state: Any, loop: LoopState) -> tuple[Any, LoopState]:
        """Return (state, loop) of the newest checkpoint, or the given ones where there is none.

        Donates `state`. `loop` is a NamedTuple of everything else that a run goes on from; `loop.step` steps
        are done. The files of the run are cut back to them.
        """
        state, found = restore_latest(self.st, self.run, state, loop._asdict())
        self.run.resume(found["step"])
        if self.reference is not None and found["reference"] is not None:
            model.assign(self.reference, found["reference"])  # a sharded model takes only its own parameters
        if "reference" in loop._fields:
            found["reference"] = self.reference
        return state, loop._replace(**{name: found[name] for name in loop._fields})

    def finish(self, state: TrainState, *, merge: bool = True) -> None:
        """Save the model that came out, and end the run, its engine and its processes.

        Adapters become part of it with `merge`, unless --no-lora-merge asks for a folder of them.
        """
        cfg = self.cfg
        merge = merge and cfg.lora_merge
        weights = final_weights(self.st, state, average=getattr(cfg, "ema", 0) > 0)
        folder = self.run.folder / "model"
        self.st.save_pretrained(folder, self.policy.module, self.task.saved, weights, merge=merge)
        if self.samples is not None:
            self.samples.close()
        if self.task.score is not None:
            self.task.score.close()
        self.run.finish()
        self.st.close()

    # ---------- collect

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the seconds of the block under `name` in the step's row of timing.jsonl."""
        return self.run.phase(name)

    @contextmanager
    def sampling_block(self, name: str = "generate") -> Iterator[None]:
        """Count the seconds of the block, and save the last whole step if the engine is lost in it."""
        with self.run.phase(name), saved_if_lost(self.run):
            yield

    def collector(self) -> collect.Collector:
        """Return the collector that the options ask for."""
        cfg, how = self.cfg, options.of(options.Collect, self.cfg)
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

    @property
    def source(self) -> collect.Source:
        """Return where a collector draws its prompts, and what answers and judges them."""
        samples, sampling = self._engine()
        return collect.Source(
            strategy=self.st,
            samples=samples,
            dataset=self.task.dataset,
            judge=self.judge,
            sampling=sampling,
            seed=self.cfg.seed,
            steps=self.steps,
            sampling_block=self.sampling_block,
        )

    def judge(self, rollout: Rollout, prompts: Sequence[Any], step: int) -> reward.Judged:
        """Return the rewards of responses, the same on every rank."""
        with self.run.phase("judge"):
            return judge(self.cfg, self.st, self.task, rollout, list(prompts), step=step)

    def push(self, state: TrainState, *, version: int) -> None:
        """Send the weights of the policy to the engine, as those after `version` steps."""
        assert self.send is not None, "nothing is sampled"
        with self.run.phase("sync"):
            self.send(state, version=version)

    def evaluation(self, step: int) -> dict[str, float]:
        """Return the mean rewards of greedy answers to unseen prompts after `step` steps; {} if not due."""
        if not self.evaluates(step):
            return {}
        samples, _ = self._engine()
        return evaluate(self.cfg, self.st, self.run, self.task, samples.engine, step=step)

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation is due after `step` steps: at both ends, and every --eval-every."""
        return step == self.steps or step % self.cfg.eval_every == 0

    def _engine(self) -> tuple[AsyncSampler, Sampling]:
        assert self.samples is not None and self.sampling is not None, "nothing is sampled"
        return self.samples, self.sampling

    # ---------- rewards

    def shaping(self, *, kl: float = 0.0) -> reward_shaping.Shaping:
        """Return the changes to rewards that the options ask for, with a KL to the initial model."""
        return reward_shaping.chain(
            clip=self.cfg.reward_clip,
            overlong=self.cfg.overlong,
            max_new=self.cfg.max_new,
            kl=kl,
            normalize=self.cfg.normalize_reward,
        )

    def reward(self, batch: Batch) -> Tensor:
        """Return the rewards [N, G] of a batch, with normalised parts where the options ask for it."""
        return normalized_reward(self.cfg, self.task, batch.judged, batch.prompts)

    def baseline(self, batch: Batch) -> dict[str, Tensor]:
        """Return {"greedy_reward": [N]}, the shaped reward of the greedy answers; {} without them."""
        if batch.greedy is None:
            return {}
        answers, graded = batch.greedy
        shaping = self.shaping()
        shaped, _, _ = shaping.apply(graded.reward, shaping.init(), answers)
        return {"greedy_reward": shaped[:, 0]}

    def steered(self, coef: float, kl: float, count: int) -> float:
        """Return the next coefficient of the KL in the reward, after `count` responses of `kl` nats."""
        if not self.cfg.kl_target:
            return coef
        target, horizon = self.cfg.kl_target, self.cfg.kl_horizon
        return reward_shaping.adaptive_kl(coef, kl, target=target, horizon=horizon, count=count)

    # ---------- learn

    def reference_logp(
        self, state: TrainState, batch: Rollout | Experience, *, unit: int = 1
    ) -> Tensor | None:
        """Return the initial model's log-probs [B, S], None where no option asks for it.

        `unit` consecutive rows share a pack, as in `st.shard`.
        """
        if self.initial is None:
            return None
        apply, params = self.initial
        params = state.params if params is None else params
        with self.run.phase("score"):
            return self.st.score(apply, params, batch, self.cfg.budget, unit=unit).logp

    @property
    def reference(self) -> Any:
        """Return the parameters of a reference that follows the policy, which a run saves; None without."""
        if self.initial is None or not options.of(options.Reference, self.cfg).ref_every:
            return None
        return self.initial[1]

    def follow(self, reference: Any, state: TrainState, step: int) -> Any:
        """Return the reference after `step` steps, moved to the policy if it is time. Donates `reference`."""
        if reference is not None and step % self.cfg.ref_every == 0:
            model.assign(reference, self.st.export(state), share=self.cfg.ref_mix)  # TR-DPO, 2404.09656
        return reference

    def value(self, state: TrainState, rollout: Rollout) -> Tensor:
        """Return the critic's values [B, S] of a rollout, without gradient."""
        assert self.critic is not None, "there is no critic"
        with self.run.phase("score"):
            found = self.st.score(
                self.critic.apply, state.params, rollout, self.cfg.budget, fields=("value",)
            )
        (value,) = check.given(value=found.value)
        return value

    def trainer_logp(
        self, state: TrainState, rollout: Rollout, step: int, *, entropy: float = 0.0
    ) -> Corrected:
        """Return the log-probs that an update starts from, factors of weights, and the entropy's bonus."""
        cfg = self.cfg
        with self.run.phase("score"):
            return correct_mismatch(
                cfg,
                self.st,
                self.apply,
                state.params,
                rollout,
                budget=cfg.budget,
                version=step,
                bonus=entropy,
            )

    def update_kl(self, state: TrainState, rollout: Rollout, own: Corrected) -> dict[str, float]:
        """Return the KL that the updates of a step made and its prediction, with --update-kl; else {}."""
        with self.run.phase("score"):
            return kl_of_updates(self.st, self.apply, state.params, rollout, own, budget=self.cfg.budget)

    def check_gap(
        self,
        floor: float,
        metrics: Mapping[str, metric.Metric],
        own: Corrected,
        batch: Batch,
        state: TrainState,
        packs: Sequence[Packed],
    ) -> tuple[dict[str, float], float]:
        """Return (the gap of trainer and sampler before the first update, its floor), within the limits.

        Both have the same weights then. `metrics` are of the first gradient, which is of `packs`; `own` are
        the trainer's log-probs, with metrics that come along.
        """
        samples, sampling = self._engine()
        inner, values = samples.engine, metric.results(metrics) | own.metrics
        gap, floor = check_gap(
            self.cfg, floor, values, batch.rollout, sampling, self.apply, state.params, packs, engine=inner
        )
        return own.metrics | gap, floor

    def halves(self, step: int) -> bool | None:
        """Return how `st.shard` cuts the batch of a step: True or None for an estimate of the noise.

        None, every 10 steps by default, keeps the usual packs; see `Strategy.shard`.
        """
        every = self.cfg.noise_every
        if every is None:
            return None if step % 10 == 0 else False
        return every > 0 and step % every == 0

    def example_packs(self, step: int, i: int) -> list[Packed]:
        """Return the packs of the examples of update i of a step, with `options.Ptx`; [] without."""
        if not self.cfg.ptx:
            return []
        return self.st.shard(draw_examples(self.cfg, self.task, step, i), self.cfg.budget)

    def tokens(
        self, loss_fn: LossFn, *, group: int = 1, unit: int = 1, names: tuple[str, ...] = ()
    ) -> TokenLog:
        """Return what records single tokens, every --tokens-every steps."""
        return TokenLog(
            self.st,
            self.run,
            self.apply,
            loss_fn,
            self.task.tokenizer,
            every=self.cfg.tokens_every,
            budget=self.cfg.budget,
            group=group,
            unit=unit,
            names=names,
        )

    # ---------- report and save

    def report(self, step: int, batch: Batch, learned: Tensor, values: Mapping[str, float]) -> float:
        """Write the metrics of a step and some of its responses, and return the mean reward.

        `values` are joined by what one reads of the rollout, and of its rewards; `learned` [N, G] are the
        rewards after shaping.
        """
        values = {**values, **metric.rollout(batch.rollout, learned), **reward.means(batch.judged, "reward")}
        if self.samples is not None:
            self.run.beside("engine", self.samples.busy())
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

        parts = loop._asdict()

        def whole() -> Mapping[str, Any]:
            if collector is None:
                return parts
            return {**parts, "collect": collector.save(parts["collect"])}

        best = getattr(self.cfg, "best", 0)
        checkpoint(self.cfg, self.st, self.run, parts["step"], state, whole, score=score, best=best)
