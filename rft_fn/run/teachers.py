"""The teachers of a run: who they are, the prompts that they see, and what they say of responses.

A teacher is a model that is bound beside the policy (a folder, or an average of the policy's weights), the
policy itself behind another prompt, or a server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rft_fn import check, collect, data, engine, loss, model, optim, packing, rng, rollout, tree
from rft_fn.collect import Batch
from rft_fn.data.chat import Chat
from rft_fn.data.responses import prompt_of_text
from rft_fn.data.templates import columns_in
from rft_fn.engine.lifetime import deferred
from rft_fn.engine.served_words import ServedWords
from rft_fn.model.teacher import HIDDEN, LOGP, WHICH, WORDS, as_bits
from rft_fn.run.distillation import FROM_REWARDS, SERVED, TeacherSpec, meet, read_teachers
from rft_fn.run.setup import Setup
from rft_fn.types import Engine, Rollout, Sampling, TrainState

__all__ = ["Taught", "Teachers", "load_teachers"]


class Taught(NamedTuple):
    """What the teachers say of a rollout."""

    extra: dict[str, Tensor]  # for the student's forward, of `model.attach_teacher`; [B, S, ...]
    logp: Tensor | None  # [B, S] of the sampled tokens, 0 outside mask; None without a teacher
    rows: Tensor  # [B] bool, the rows with a teacher and all that its prompt asks for
    metrics: dict[str, float]


def load_teachers(env: Setup) -> "Teachers":
    """Load the teachers of a run; their models are on the host while they do not score, if models are."""
    members = [_Member(env, spec) for spec in read_teachers(env.cfg)]
    return Teachers(env, members)


class _Member:
    """One teacher: a bound model, or what the policy is at the time."""

    def __init__(self, env: Setup, spec: TeacherSpec):
        self.env = env
        self.spec = spec
        self.bound: tuple[Any, Any] | None = None
        self.served: ServedWords | None = None
        if spec.kind in ("folder", "ema"):
            place = spec.place if spec.kind == "folder" else env.cfg.model
            module = model.load(place, meta=env.st.world > 1)
            plain = Sampling(temperature=env.cfg.temperature)  # its words are not cut by top_p
            self.bound = env.st.bind(module, sampling=plain)
        if spec.kind in SERVED and env.cfg.loss != "nll":
            self.served = meet(env.cfg, env.st, spec, env.task.tokenizer)

    def model(self, state: TrainState) -> tuple[Any, Any]:
        """Return (apply, params), with the weights of now."""
        if self.bound is None:
            return self.env.policy.apply, state.params
        if self.spec.kind == "ema":
            average = tree.replace(state, params=optim.ema_params(state.opt))
            model.assign(self.bound[1], self.env.st.export(average))
        return self.bound

    def score(self, state: TrainState, rows: Rollout) -> tuple[dict[str, Tensor], Tensor, Any]:
        """Return (extras, log-probs of the tokens, head or None) of rows of its own prompts."""
        cfg, st = self.env.cfg, self.env.st
        if self.served is not None:
            mine = range(st.rank, len(rows.tokens), st.world)
            found = self.served.score(rows, mine, cfg.top_k if cfg.loss in loss.DIVERGENCES else 0)
            logp, words, words_logp = (st.gather(x[None]).sum(0) for x in found)
            return ({WORDS: words, LOGP: words_logp} if cfg.loss in loss.DIVERGENCES else {}), logp, None
        apply, params = self.model(state)
        rows = tree.replace(rows, routing=None)  # a teacher chooses its experts by itself
        rows = tree.replace(rows, sampling=None) if self.bound is not None else rows
        if cfg.teacher_temperature is not None:
            each = torch.full((len(rows.tokens),), cfg.teacher_temperature)
            rows = tree.replace(rows, temperature=each)
        if cfg.loss not in loss.DIVERGENCES:
            return {}, st.score(apply, params, rows, cfg.budget).logp, None
        with model.revealed(apply, top_k=cfg.top_k) as asked:
            fields = ("top_words", "words_logp") if cfg.top_k else ("hidden",)
            out = st.score(apply, params, rows, cfg.budget, fields=fields)
        if cfg.top_k:
            words, words_logp = check.given(top_words=out.top_words, words_logp=out.words_logp)
            return {WORDS: words, LOGP: words_logp}, out.logp, None
        (hidden,) = check.given(hidden=out.hidden)
        return {HIDDEN: hidden}, out.logp, asked.head


class Teachers:
    """All teachers of a run; a row of data has one of them."""

    def __init__(self, env: Setup, members: Sequence[_Member]):
        self.env = env
        self.members = list(members)
        self.numbers = {member.spec.name: i for i, member in enumerate(members)}
        self.engines: dict[int, Engine] = {}
        self.window = model.read_window(env.cfg.model)

    def say(self, state: TrainState, batch: Batch) -> Taught:
        """Return what the teachers say of a batch, each of the rows that name it; the student is told."""
        cfg, responses = self.env.cfg, batch.rollout
        taught = torch.ones(len(responses.tokens), dtype=torch.bool)
        if not self.members or cfg.loss == "nll":
            return Taught({}, None, taught, {})
        seen, taught = self._with_hints(batch)
        number = self._number_of(batch)
        extra: dict[str, Tensor] = {}
        logp = torch.zeros_like(responses.logp)
        heads: list[Any] = [None] * len(self.members)
        with self.env.phase("teach"):
            for i, member in enumerate(self.members):
                at = (number == i).nonzero()[:, 0]
                if not len(at):
                    continue
                rows = rollout.take(seen, at.tolist())
                found, theirs, heads[i] = member.score(state, rows)
                mask = responses.mask[at]
                logp[at] = _moved(theirs, rows.mask, mask)
                for name, x in found.items():
                    extra[name] = _joined(extra.get(name), _moved(x, rows.mask, mask), at, len(number))
        if len(self.members) > 1:
            extra[WHICH] = number[:, None].expand(responses.tokens.shape).contiguous()
        self._attach(heads)
        gap = (responses.logp - logp)[responses.mask & taught[:, None]]
        metrics = {"distill/taught": float(taught.float().mean())}
        if bool(responses.logp.any()):  # the student's own
            metrics["distill/kl_sampled"] = float(gap.double().mean()) if len(gap) else 0.0
        if LOGP in extra:
            tail = loss.with_tail(extra[LOGP])[..., -1].exp()[responses.mask]
            metrics["distill/tail"] = float(tail.double().mean())
        extra = {name: as_bits(x) if name in (HIDDEN, LOGP) else x for name, x in extra.items()}
        return Taught(extra, logp, taught, metrics)

    def _attach(self, heads: Sequence[Any]) -> None:
        """Tell the student how it compares itself with the teachers of this step."""
        cfg = self.env.cfg
        if cfg.loss not in loss.DIVERGENCES:
            return
        divergence = loss.divergence(cfg.loss, beta=cfg.jsd_beta, alpha=cfg.skew)
        temperature = cfg.teacher_temperature or Sampling(temperature=cfg.temperature).distribution[0]
        made = [model.Teacher(divergence, head, temperature) for head in heads]
        model.attach_teacher(self.env.policy.apply, *made)

    def _number_of(self, batch: Batch) -> Tensor:
        """Return the number of the teacher of each row [B]. ValueError for a name that none has."""
        column = self.env.cfg.teacher_column
        if not column:
            return torch.zeros_like(batch.rollout.group)
        names = [str(prompt.columns[column]) for prompt in batch.prompts]
        for name in names:
            if name not in self.numbers:
                known = ", ".join(self.numbers)
                raise ValueError(f"teacher: expected one for {column} {name!r}, got some for {known}")
        return torch.tensor([self.numbers[name] for name in names])[batch.rollout.group]

    def _with_hints(self, batch: Batch) -> tuple[Rollout, Tensor]:
        """Return (the responses after the teachers' prompts, whether each row has all that they ask for)."""
        every = torch.ones(len(batch.rollout.tokens), dtype=torch.bool)
        cfg = self.env.cfg
        if not cfg.hint:
            return batch.rollout, every
        columns = [_given(cfg.hint, cfg.success_at, batch, b) for b in range(len(every))]
        taught = torch.tensor([row is not None for row in columns])
        prompts = [
            self._hinted(batch.prompts[g], row) if row is not None else batch.prompts[g]
            for g, row in zip(batch.rollout.group.tolist(), columns)
        ]
        return rollout.with_prompts(batch.rollout, prompts, group=range(len(prompts))), taught

    def _hinted(self, prompt: data.Prompt, more: Mapping[str, str]) -> data.Prompt:
        """Return the teacher's prompt for a row."""
        cfg, task = self.env.cfg, self.env.task
        chat = Chat(task.tokenizer, data.literals(cfg.chat_template_kwargs), task.processing)
        place = f"row {prompt.index + 1}"
        row = {**prompt.columns, **more}
        text = data.fill(cfg.hint, row, place)
        _, ids, encoded = prompt_of_text(chat, text, row, place, cfg.system)
        if self.window is not None and len(ids) + cfg.max_new > self.window:
            raise ValueError(
                f"hint: expected at most {self.window - cfg.max_new} tokens before a response, got {len(ids)}"
            )
        return replace(prompt, ids=ids, text=text, media=None if encoded is None else encoded.media)

    def on_policy(self, step: int) -> bool:
        """Return whether the student samples the responses of a step: a share of them, evenly spread."""
        share = self.env.cfg.on_policy
        return int((step + 1) * share + 1e-9) > int(step * share + 1e-9)

    def batch(self, step: int) -> Batch:
        """Return a step's responses that the teachers sample, or that the rows give."""
        env, cfg = self.env, self.env.cfg
        prompts, keys = data.draw(env.task.dataset, cfg.prompts, step, cfg.seed)
        given = cfg.off_policy == "given"
        with env.sampling_block("demonstrate"):
            found = self._given_responses(prompts) if given else self._demonstrated(prompts, keys)
        learned = rollout.without_truncated(found) if cfg.mask_truncated else found
        return Batch(list(prompts), found, env.judge(found, prompts, step), learned=learned)

    def _given_responses(self, prompts: Sequence[data.Prompt]) -> Rollout:
        """Return one response to each prompt, which its row gives."""
        cfg, task = self.env.cfg, self.env.task
        lessons = [
            data.lessons(
                prompt,
                task.tokenizer,
                response=cfg.response,
                chat_template_kwargs=data.literals(cfg.chat_template_kwargs),
            )[0]
            for prompt in prompts
        ]
        exp = packing.conversations(lessons)
        each = torch.arange(len(prompts))
        return Rollout(
            tokens=exp.tokens,
            mask=exp.mask,
            logp=torch.zeros_like(exp.w),
            length=exp.length,
            truncated=torch.zeros_like(each, dtype=torch.bool),
            group=each,
            version=torch.zeros_like(each),
            media=exp.media,
            sampling=self.env.sampling,
        )

    def _demonstrated(self, prompts: Sequence[data.Prompt], keys: Sequence[int]) -> Rollout:
        """Return responses that the teachers sample to their own prompts, after the student's."""
        cfg, st = self.env.cfg, self.env.st
        sampling = Sampling(
            temperature=cfg.temperature if cfg.teacher_temperature is None else cfg.teacher_temperature,
            top_p=cfg.teacher_top_p,
            max_new=cfg.max_new,
        )
        asked = [self._hinted(prompt, {}) if cfg.hint else prompt for prompt in prompts]
        column = cfg.teacher_column
        number = [self.numbers[str(p.columns[column])] if column else 0 for p in prompts]
        parts, order = [], []
        for i, member in enumerate(self.members):
            at = [j for j, n in enumerate(number) if n == i]
            if at:
                mine = [asked[j] for j in at], [rng.fold_in(keys[j], "teacher") for j in at]
                parts.append(
                    collect.gather_and_generate(
                        self._engine(i, member), st, *mine, n=cfg.group, sampling=sampling
                    )
                )
                order += at
        joined = rollout.concat(parts)
        whole = rollout.with_prompts(joined, [prompts[j] for j in order])
        rows = {j: place for place, j in enumerate(order)}
        index = [rows[j] * cfg.group + k for j in range(len(prompts)) for k in range(cfg.group)]
        group = torch.arange(len(prompts)).repeat_interleave(cfg.group)
        found = rollout.take(whole, index)
        unknown = torch.zeros_like(found.logp)  # to the student
        return tree.replace(found, logp=unknown, group=group, temperature=None, sampling=self.env.sampling)

    def _engine(self, i: int, member: _Member) -> Engine:
        """Return the engine of a teacher, which keeps the weights that it starts with."""
        if i not in self.engines:
            st, task, spec = self.env.st, self.env.task, member.spec
            config = replace(engine.config_of(st.config), process=False, routing=False, alone=True)
            place = self.env.cfg.model
            if spec.kind in SERVED:
                config = replace(config, type=spec.kind, servers=(spec.place,), actors=1, actor_type="hf")
            elif spec.kind == "folder":
                place = spec.place
            self.engines[i] = deferred(partial(engine.get_engine, config, place, task.tokenizer))
        return self.engines[i]

    def close(self) -> None:
        """End the engines of the teachers."""
        for each in self.engines.values():
            each.close()


def _given(hint: str, success_at: float, batch: Batch, b: int) -> dict[str, str] | None:
    """Return what rewards say for the hint of row b; None where the rollout has nothing to say."""
    asked = columns_in(hint) & {*FROM_REWARDS}
    found = {}
    group = batch.rollout.group
    if "success" in asked:
        flat = batch.judged.reward.flatten()
        others = [i for i in (group == group[b]).nonzero()[:, 0].tolist() if i != b and flat[i] >= success_at]
        if not others:
            return None
        found["success"] = batch.judged.texts[others[0]]
    if "feedback" in asked:
        said = [x for name, x in batch.judged.extra.items() if name.endswith("/feedback")]
        if not said:
            raise ValueError("hint: expected a reward that gives `feedback` for {feedback}, got none")
        if said[0][b] is None or not str(said[0][b]):
            return None
        found["feedback"] = str(said[0][b])
    return found


def _moved(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Move numbers [B, S', ...] of the tokens in `source` to the tokens in `target` [B, S], in order."""
    out = x.new_zeros(*target.shape, *x.shape[2:])
    out[target] = x[source]
    return out


def _joined(whole: Tensor | None, part: Tensor, at: Tensor, size: int) -> Tensor:
    """Put the rows `at` of a teacher into [B, S, ...]; hidden states are padded to the widest teacher's."""
    width = part.shape[-1]
    if whole is None:
        whole = part.new_zeros(size, *part.shape[1:])
    if whole.shape[-1] < width:
        whole = F.pad(whole, (0, width - whole.shape[-1]))
    whole[at] = F.pad(part, (0, whole.shape[-1] - width))
    return whole
