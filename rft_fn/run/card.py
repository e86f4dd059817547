"""The model card of a folder that a run wrote: its README.md, made of what the run's folder says."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rft_fn import border, hub
from rft_fn.data import file_formats, sources
from rft_fn.run.earlier_run import FACTS, settings
from rft_fn.run.files import write_whole
from rft_fn.text import shown_without_secrets

__all__ = ["save_card"]

_MARK = re.compile(r"^<!-- written by rft_fn, (\w+); a changed card stays -->\n", re.M)
_PEFT = "### Framework versions"  # what peft adds at the end of every card, ours too
_TEMPLATE = "[More Information Needed]"  # peft's own card, where there is none
# options about the machine of the run
_PLACES = {"out", "override", "trackers", "project", "run_name", "media_cache", "media_folder"}
_PLACES |= {"engine_servers", "log_dir", "extra"}
_SHOWN = re.compile(
    r"(reward|eval)/.*|loss|accuracy|policy/(kl_ref|entropy|logp_gap)|kl/ref|rollout/(length_mean|truncated)"
)
_MEAN_OF = 10  # steps, of the reward
# (what the folder has, what it holds, the library that loads it, how)
_KINDS = (
    ("adapter_config.json", "Low-rank adapters", "peft", "peft puts them on the base model"),
    ("value_head.safetensors", "A critic", "rft_fn", "`rft.model.load_critic` loads it"),
    ("reward_head.safetensors", "A reward model", "rft_fn", "`rft.model.load_reward` loads it"),
    ("", "A model", "transformers", "transformers loads it"),
)
_LICENSES = {"Apache License": "apache-2.0", "MIT License": "mit"}  # by their titles
_MODEL = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")  # names of the hub
_DATA_SET = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class _Base(NamedTuple):
    """What is known of the model that a run started from."""

    name: str  # as a reader may know it
    hub: str = ""  # its name on the hub, or of the model that it was made of
    license: Mapping[str, str] = {"license": "unknown"}  # metadata of the hub: license, license_name ...


def save_card(folder: str | Path, run: str | Path, *, step: int | None = None) -> Path | None:
    """Write the card of a model as README.md in its folder.

    The model is of the run in the folder `run`, after `step` steps or after the last one. The card has the
    base model and its licence, the data with digests, the algorithm, the options and the metrics. Returns the
    file; None where a README.md is there that somebody else has written or changed, which stays. ValueError
    for a folder of a run without config.json.
    """
    folder, run = Path(folder), Path(run)
    path = folder / "README.md"
    if path.exists() and not _is_ours(path.read_text(errors="replace")):
        return None
    write_whole(path, _card(folder, run, step))
    return path


def _is_ours(text: str) -> bool:
    """Return whether a README.md is a card that nobody has changed, or peft's empty one."""
    found = _MARK.search(text)
    if found is None:
        return _TEMPLATE in text
    return found[1] == _digest(text[found.end() :].partition(_PEFT)[0])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.strip().encode(), digest_size=8).hexdigest()


def _card(folder: Path, run: Path, step: int | None) -> str:
    """Return the text of the card: metadata of the hub, then the page."""
    options = settings(run)
    facts = {name: options.pop(name) for name in FACTS if name in options}
    made_by = facts.get("made_by", {})
    script = made_by.get("script", "")
    what, library, how = next(kind[1:] for kind in _KINDS if not kind[0] or (folder / kind[0]).exists())
    is_critic = what == "A critic"
    base = _base(str((is_critic and options.get("critic")) or options.get("model", "")))
    rows = _rows(run, step)
    done = rows[-1]["step"] + 1 if rows else 0
    algorithm = str(options.get("algorithm") or Path(script).stem)

    about: dict[str, Any] = {"base_model": base.hub} if base.hub else {}
    about |= {**base.license, "library_name": library}
    about["tags"] = [tag for tag in ("rft_fn", algorithm) if tag]
    if named := _data_sets(options):
        about["datasets"] = named

    by = [f"`{script}`" if script else "", f"rft_fn {made_by['rft_fn']}" if made_by else "rft_fn"]
    body = [
        f"# {run.resolve().name}\n",
        f"{what}, fine-tuned with rft_fn; {how}.\n",
        f"* Base model: {base.name}; its licence: {list(base.license.values())[-1]}.",
        f"* Algorithm: {algorithm or 'unknown'}, {done} step{'s' * (done != 1)}.",
        f"* Made by: {', '.join(filter(None, [*by, facts.get('date')]))}.\n",
        *_data_lines(options, facts.get("digests", {})),
        *_metric_lines(rows),
        *_changes(run, done),
        "<details><summary>All options of the run</summary>\n",
        f"```json\n{json.dumps(_shown(options), indent=1)}\n```\n",
        "</details>",
    ]
    text = "\n".join(body)
    import yaml

    front = yaml.safe_dump(about, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n<!-- written by rft_fn, {_digest(text)}; a changed card stays -->\n{text}\n"


def _base(name: str) -> _Base:
    """Return what is known of a base model: a name that is built in, a folder, or a name of the hub."""
    if name == "smollm2-135m":
        return _Base(
            "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", {"license": "apache-2.0"}
        )
    if name.partition(":")[0] in ("tiny", "tiny-vl", "tiny-audio"):
        return _Base(f"`{name}`, a small model that rft_fn builds")
    if not name or not (Path(name).is_dir() or _MODEL.fullmatch(name)):
        return _Base(f"`{_short(name)}`" if name else "a model")
    if not Path(name).is_dir():
        return _Base(f"`{name}`", name, _license(_metadata(_fetched(name)), None))

    # a folder: its card may name the model that it was made of
    about = _metadata(Path(name, "README.md"))
    return _Base(f"`{_short(name)}`", _first(about.get("base_model")), _license(about, Path(name)))


def _license(about: Mapping[str, Any], folder: Path | None) -> dict[str, str]:
    """Return the licence in the metadata of a model, or else in the LICENSE file of its folder."""
    found = _first(about.get("license"))
    if not found:
        return {"license": (_license_file(folder) if folder else "") or "unknown"}
    link, name = _first(about.get("license_link")), _first(about.get("license_name"))
    links = {"license_link": link} if link.startswith("https://") else {}  # others are files of that model
    return {"license": found} | links | ({"license_name": name} if name else {})


def _first(x: Any) -> str:
    """Return a text of metadata, the first one of a list; "" for anything else."""
    x = x[0] if isinstance(x, list) and x else x
    return x if isinstance(x, str) else ""


def _fetched(name: str) -> Path:
    """Return the card of a model of the hub, or a path where there is none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "README.md", local_files_only=bool(hub.unreachable())))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
        return Path(name, "README.md")


def _metadata(readme: Path) -> Mapping[str, Any]:
    """Return the metadata at the head of a card; empty where there is none that can be read."""
    from huggingface_hub import metadata_load

    try:
        return metadata_load(readme) or {}
    except Exception:  # whatever a file that is not ours makes of the reader
        return {}


def _license_file(folder: Path) -> str:
    """Return the licence of a folder by its LICENSE file; "other" for one that is not known."""
    found = [path for path in sorted(folder.glob("LICENSE*")) if path.is_file()]
    if not found:
        return ""
    head = found[0].read_text(errors="replace")[:500]
    return next((name for title, name in _LICENSES.items() if title in head), "other")


def _data(options: Mapping[str, Any]) -> list[str]:
    """Return the texts of the sources of the data."""
    found = options.get("data") or ()
    return [found] if isinstance(found, str) else [text for text in found if isinstance(text, str)]


def _data_sets(options: Mapping[str, Any]) -> list[str]:
    """Return the names of the data that are data sets of the hub."""
    found = {}
    for text in _data(options):
        try:
            source = sources.parse(text)
        except ValueError:  # the data of a script that reads this option in its own way
            continue
        if _is_on_hub(source):
            found[source.name] = None
    return list(found)


def _is_on_hub(source: sources.Source) -> bool:
    """Return whether a source is a data set of the hub: OWNER/NAME, and nothing here has that name."""
    path = Path(source.name)
    is_file = path.exists() or bool(file_formats.suffix_of(path))
    return not is_file and _DATA_SET.fullmatch(source.name) is not None


def _data_lines(options: Mapping[str, Any], digests: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of the data and of the code of rewards."""
    parts = [(name, x) for name in ("data", "eval_data") for x in digests.get(name) or ()]
    if not parts:
        parts = [("data", {"name": text}) for text in _data(options)]
    yield "## Data\n\n| | name | rows | digest |\n|---|---|---|---|"
    for name, x in parts:
        rows, digest = x.get("rows") or "generated", x.get("digest") or ""
        yield f"| {name} | {_cell(_short(x['name']))} | {rows} | {digest} |"
    for path, digest in (digests.get("files") or {}).items():
        yield f"| code | {_cell(_short(path))} | | {digest} |"
    yield ""


def _rows(run: Path, step: int | None) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, of the first `step` steps where that is given."""
    rows = border.json_rows(run / "metrics.jsonl")
    return [row for row in rows if step is None or row["step"] < step]


def _metric_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the newest value of each metric that says how good the model is."""
    last: dict[str, tuple[float, int]] = {}
    for row in rows:
        for name, x in row.items():
            if x is not None and _SHOWN.fullmatch(name):
                last[name] = (x, row["step"] + 1)
    if not last:
        return
    yield "## Metrics\n\n| | value | step |\n|---|---|---|"
    means = [row["reward/mean"] for row in rows[-_MEAN_OF:] if row.get("reward/mean") is not None]
    if means:
        mean = sum(means) / len(means)
        steps = "step" if len(means) == 1 else f"{len(means)} steps"
        yield f"| reward/mean, mean of the last {steps} | {mean:.4g} | {last['reward/mean'][1]} |"
    for name in sorted(last):
        x, step = last[name]
        yield f"| {_cell(name)} | {x:.4g} | {step} |"
    yield ""


def _changes(run: Path, done: int) -> Iterator[str]:
    """Yield the options that were changed in mid-run, up to `done` steps."""
    rows = border.json_rows(run / "overrides.jsonl")
    for row in (row for row in rows if row["step"] < done):
        old, new = json.dumps(_shown(row["old"])), json.dumps(_shown(row["new"]))
        yield f"* From step {row['step'] + 1} on `{row['name']}` was {new}, and {old} before.\n"


def _shown(x: Any) -> Any:
    """Return options without what is empty, without places of the machine, and with short paths."""
    if isinstance(x, Mapping):
        kept = {name: y for name, y in x.items() if name not in _PLACES and y not in ("", None, [], {})}
        return {name: _shown(y) for name, y in kept.items()}
    if isinstance(x, list):
        return [_shown(y) for y in x]
    return shown_without_secrets(_short(x)) if isinstance(x, str) else x


def _short(text: str) -> str:
    """Return a text without the folders of absolute paths, which are about somebody's machine."""
    return re.sub(r"(?<![\w/.*}])~?/(?:[\w.@+-]+/)+(?=[\w.@+*-])", "", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
