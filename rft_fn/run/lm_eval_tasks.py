"""Tasks of lm-eval, answered by our engine and graded by lm-eval, each response by itself."""

import logging
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from rft_fn.collect import gather_and_generate
from rft_fn.run.evaluation_result import Measured, answer_numbers
from rft_fn.text import error_text
from rft_fn.types import Engine, Sampling, Strategy

if TYPE_CHECKING:
    from rft_fn.run.lm_eval_model import EngineModel

__all__ = ["PREFIX", "check_tasks", "harness_model", "harness_tasks"]

PREFIX = "lm_eval:"
"""The first word of a task of lm-eval."""


def check_tasks(names: Sequence[str]) -> None:
    """Raise ValueError for tasks that lm-eval cannot load or grade, ModuleNotFoundError without it."""
    for name in names:
        if not name.startswith(PREFIX) or name == PREFIX:
            raise ValueError(
                f"tasks: expected {PREFIX}TASK or {PREFIX}FILE.yaml, got {name!r}; other harnesses ask the "
                "endpoint of rft serve-model"
            )
    try:
        import lm_eval  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"tasks: expected the package lm-eval for {names[0]}, got none; pip install 'rft-fn[eval]'",
            name=error.name,
        ) from error
    for name in names:
        for task_name, task in _loaded(name)[1].items():
            _check(task_name, task, 1)


def harness_model(
    engine: Engine,
    st: Strategy,
    tokenizer: Any,
    *,
    seed: int,
    window: int | None,
    batch: int,
    temperature: float | None = None,
    top_p: float | None = None,
    max_new: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> "EngineModel":
    """Return an engine as a model of lm-eval; temperature, top_p and max_new replace those of tasks."""
    from rft_fn.run.lm_eval_model import EngineModel

    def sampling(arguments: Mapping[str, Any]) -> Sampling:
        own_top_p = float(arguments.get("top_p") or 1.0)
        return Sampling(
            temperature=float(arguments.get("temperature") or 0.0) if temperature is None else temperature,
            top_p=own_top_p if top_p is None else top_p,
            top_k=int(arguments.get("top_k") or 0),
            max_new=int(arguments["max_gen_toks"]) if max_new is None else max_new,
            stop=tuple(text for text in arguments.get("until") or [] if text),
        )

    def generate(prompts: list[list[int]], keys: list[int], n: int, how: Sampling) -> Any:
        return gather_and_generate(engine, st, prompts, keys, n=n, sampling=how)

    def score(rollout: Any, how: Sampling) -> Any:
        if "score" not in engine.status()["supported"]:
            raise ValueError(
                "tasks: expected an engine that scores texts for tasks of choices, got one without"
            )
        engine.wake()
        return engine.score(rollout, sampling=how)

    return EngineModel(
        generate,
        score,
        sampling,
        tokenizer,
        seed=seed,
        window=window,
        batch=batch,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
    )


def harness_tasks(
    model: "EngineModel",
    names: Sequence[str],
    *,
    repeats: int = 1,
    count: int | None = None,
    fewshot: int | None = None,
    chat: bool = False,
    system: str | None = None,
) -> list[Measured]:
    """Answer every problem of tasks `repeats` times, and grade each answer as the task grades one.

    There is an entry for each task, filter (how answers are extracted) and metric that is averaged. `count`
    limits the problems of a task, `fewshot` replaces its number of examples, with `chat` prompts are chats by
    the model's template. ValueError, in a line, for what lm-eval cannot load or grade.
    """
    import lm_eval  # pyright: ignore[reportMissingImports]

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    measured: list[Measured] = []
    for name in names:
        manager, tasks = _loaded(name)
        for task_name, task in tasks.items():
            _check(task_name, task, repeats)
            task.set_config(key="repeats", value=repeats)
            before = model.shortened, model.cut_off, model.responses
            own = lm_eval.simple_evaluate(
                model=model,
                tasks=[task],
                task_manager=manager,  # else it makes an index of its own
                num_fewshot=fewshot,
                limit=count,
                bootstrap_iters=0,
                system_instruction=system,
                apply_chat_template=chat,
                fewshot_as_multiturn=chat,
            )
            after = model.shortened, model.cut_off, model.responses
            shortened, cut_off, responses = (b - a for a, b in zip(before, after, strict=True))
            further = {"truncated": cut_off / responses} if responses else {}
            protocol = _protocol(task_name, task, model, chat=chat, system=system, shortened=shortened)
            reported = (own or {}).get("results", {}).get(task_name, {})
            measured += _graded(task_name, task, repeats, further, protocol, reported)
    return measured


@cache
def _loaded(name: str) -> tuple[Any, dict[str, Any]]:
    """Return (what has loaded a task, tasks by name). ValueError for what lm-eval cannot load."""
    try:
        own_name = name.removeprefix(PREFIX)
        manager = _manager(own_name.endswith(".yaml"))
        return manager, manager.load([own_name])["tasks"]
    except Exception as error:  # of any kind: a hub without network, a missing package, a wrong file
        raise ValueError(f"tasks: {name}: {type(error).__name__}: {error_text(error)}") from error


@cache
def _manager(of_files: bool) -> Any:
    """Return what loads tasks: of files without the index of the package's own, which takes seconds."""
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    return TaskManager(include_defaults=not of_files)


def _check(name: str, task: Any, repeats: int) -> None:
    """Refuse what would run a model's code here, what is not in text, and what has no use for repeats."""
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(
            f"tasks: {name}: expected a task that runs no code of the model, got one that runs it here, "
            "unconfined; --data with --reward code:COLUMN runs it in a sandbox"
        )
    if getattr(task, "MULTIMODAL", False):
        raise ValueError(f"tasks: {name}: expected a task of texts, got one with images")
    if repeats > 1 and task.OUTPUT_TYPE != "generate_until":
        raise ValueError(
            f"group: expected 1 for {name}, whose answers are scored and not sampled, got {repeats}"
        )


def _protocol(
    name: str, task: Any, model: "EngineModel", *, chat: bool, system: str | None, shortened: int
) -> dict[str, Any]:
    """Return what the numbers of a task depend on, apart from the model."""
    first = min(task.instances, key=lambda x: (x.doc_id, x.idx))
    found: dict[str, Any] = {
        "harness": f"lm-eval {metadata.version('lm_eval')}, {name} version {task.VERSION}",
        "template": "the model's chat template" if chat else "plain text",
        "system": system,
        "few-shot examples": task.config.num_fewshot,
        "first prompt": first.args[0],
    }
    if task.OUTPUT_TYPE == "generate_until":
        from lm_eval.models.utils import normalize_gen_kwargs  # pyright: ignore[reportMissingImports]

        how = model.sampling(normalize_gen_kwargs(dict(first.args[1])))
        found |= {"temperature": how.temperature, "top_p": how.top_p, "top_k": how.top_k}
        found |= {"max_new": how.max_new, "stop": list(how.stop)}
    if shortened:
        found["prompts without their first tokens"] = shortened
    return found


def _graded(
    name: str,
    task: Any,
    repeats: int,
    further: Mapping[str, float],
    protocol: Mapping[str, Any],
    reported: Mapping[str, Any],
) -> list[Measured]:
    """Grade the answers to each problem one by one; lm-eval itself keeps the first of them."""
    by_doc: dict[int, list[Any]] = {}
    for instance in sorted(task.instances, key=lambda x: (x.doc_id, x.idx)):
        by_doc.setdefault(instance.doc_id, []).append(instance)
    answers = {id(x): list(x.resps) for x in task.instances}
    kinds = {metric for metric, how in task.aggregation().items() if _is_mean(how)}

    # {(filter, metric): [repeats][N]}, and the extracted answers by filter
    values: dict[tuple[str, str], list[list[float]]] = {}
    read: dict[str, list[list[Any]]] = {}
    for j in range(repeats):
        for x in task.instances:
            x.resps, x.filtered_resps = [answers[id(x)][j]], {}
        try:
            task.apply_filters()
        except AssertionError as error:
            raise ValueError(
                f"tasks: {name}: expected filters that read one answer, got one of several "
                f"({error_text(error)}); --k asks for majorities here"
            ) from error
        for kind in task.instances[0].filtered_resps:
            taken = [[x.filtered_resps[kind] for x in own] for own in by_doc.values()]
            read.setdefault(kind, []).append([own[0] if len(own) == 1 else None for own in taken])
            graded = [task.process_results(own[0].doc, x) for own, x in zip(by_doc.values(), taken)]
            for metric in graded[0]:
                column = [row[metric] for row in graded]
                if metric in kinds and all(isinstance(x, numbers.Real) for x in column):
                    values.setdefault((kind, metric), []).append([float(x) for x in column])
    for x in task.instances:
        x.resps = answers[id(x)]
    rows = _rows(name, by_doc, read)
    first = next(iter(values), None)
    measured = []
    for (kind, metric), column in values.items():
        measured.append(
            Measured(
                name=f"{name}/{kind}/{metric}",
                value=torch.tensor(column, dtype=torch.float64).T,
                answer=answer_numbers([list(x) for x in zip(*read[kind])]),
                further=further,
                protocol={**protocol, "extraction": kind, "metric": metric},
                reported=reported.get(f"{metric},{kind}"),
                rows=rows if (kind, metric) == first else [],
            )
        )
    if not measured:
        raise ValueError(
            f"tasks: {name}: expected a metric that is a mean over problems, got {sorted(reported)}"
        )
    return measured


def _is_mean(how: Callable[..., Any]) -> bool:
    return getattr(how, "__name__", "") in ("mean", "nanmean")


def _rows(
    name: str, by_doc: Mapping[int, list[Any]], read: Mapping[str, list[list[Any]]]
) -> list[dict[str, Any]]:
    """Return a row for each response, with what the filters read in it."""
    rows = []
    for i, (doc, own) in enumerate(by_doc.items()):
        for j in range(len(own[0].resps)):
            row = {"task": name, "problem": doc, "sample": j, "prompt": own[0].args[0]}
            row["response"] = own[0].resps[j] if len(own) == 1 else [x.resps[j] for x in own]
            rows.append(row | {f"answer/{kind}": column[j][i] for kind, column in read.items()})
    return rows
