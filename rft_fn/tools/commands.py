"""The command `rft`: scripts, and what can be done with runs. A new command is a row of `COMMANDS`.

Help, version and the paths of scripts are printed without torch: what loads it is imported when used.
"""

import difflib
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

import rft_fn
from rft_fn import limits, parsing
from rft_fn.limits import Range
from rft_fn.tools import printer, scripts
from rft_fn.tools.page.recorded import Name, read_all
from rft_fn.tools.plan.plan_options import Plan

__all__ = ["COMMANDS", "Command", "Script", "main"]


_LONGEST = 100  # characters of the name of a page


@dataclass(frozen=True)
class New:
    """Copy a whole script, to be changed; without one, list them."""

    script: tyro.conf.Positional[str] = ""  # a name of the list
    to: tyro.conf.Positional[str] = ""  # the file or the folder of the copy; if empty, SCRIPT.py here


@dataclass(frozen=True)
class Run:
    """Run a script with options of its own; rft run SCRIPT --help shows them.

    On several processes, here two, either of

        torchrun --nproc-per-node 2 --no-python rft run grpo ...

        torchrun --nproc-per-node 2 -m rft_fn run grpo ...
    """

    script: tyro.conf.Positional[str]  # a name that rft new lists, or a .py file; its options follow


@dataclass(frozen=True)
class Where:
    """Print the file of a script, for programs that want a path; with --model the longest rows that fit."""

    script: tyro.conf.Positional[str]  # a name that rft new lists
    model: str = ""  # as the scripts take it; below the path are the longest rows that fit in training it
    lora_rank: Annotated[int, Range(0)] = 0  # rank of the adapters that are trained; 0: all weights
    memory: Annotated[float, Range(0)] = 0.0  # GB of a GPU; 0 is what is free on this machine


@dataclass(frozen=True)
class Launch:
    """Start the programs of a run that a file names, in order, and end them together."""

    file: tyro.conf.Positional[str]  # a .toml file of roles, as docs/howto/launch.md has it
    dry_run: bool = False  # print the commands with their addresses, and start nothing
    to: Literal["", "slurm", "k8s"] = ""  # print the file for a cluster, and start nothing
    out: str = ""  # with --to, the file that is written; if empty, the terminal


@dataclass(frozen=True)
class Report:
    """Write one page about runs that needs no server: curves, time, options, and every token with colours."""

    runs: tyro.conf.Positional[tuple[str, ...]]  # folders of runs; those that differ only in seed are a group
    out: str = ""  # the page; if empty, report.html in the folder of the run, for several A_B.html here


@dataclass(frozen=True)
class Watch:
    """Show a run in the terminal until it ends: the last responses in colour, quantiles, phases, metrics."""

    run: tyro.conf.Positional[str]  # folder of the run
    every: float = 2.0  # seconds between two looks
    once: bool = False  # show it as it stands, and end
    color: Name = "push"  # the number of each token that it is coloured by; docs/commands.md has what each is


@dataclass(frozen=True)
class Doctor:
    """Show versions, devices, engines and room, with a remedy for each thing that is wrong or missing."""

    json: bool = False  # as JSON, for a bug report
    imports: bool = False  # also import each package, to find broken ones, which takes a minute


@dataclass(frozen=True)
class Migrate:
    """Print our command for a config of TRL, verl, OpenRLHF, LightRFT or prime-rl, and what differs."""

    file: tyro.conf.Positional[str] = ""  # a shell or Python script, .yaml, .toml or .json
    system: Literal["", "trl", "verl", "openrlhf", "lightrft", "prime-rl"] = ""  # if empty, as the file tells
    trainer: Literal["", "sft", "dpo", "rm", "rl"] = ""  # if empty, as the file tells
    from_version: str = ""  # release of the library whose defaults count; if empty, as the file tells
    table: bool = False  # print all options that are known of the system


@dataclass(frozen=True)
class Certify:
    """Run every check of a loss of yours and compute its bias; exit with 1 if one fails."""

    loss: tyro.conf.Positional[str]  # FILE.py:NAME of a loss (out, b) -> [T]; or a row of algorithm.TABLE
    weight: str = ""  # its normaliser: a name of rft.weight, constant:LENGTH, or FILE.py:NAME
    extra: str = ""  # FILE.py:NAME of a function of the batch that makes what the loss reads of b.extra
    unit: int = 1  # rows that belong together: 2 for losses of pairs
    no_policy: bool = False  # no policy loss, but a value, a supervised one: three checks are left out
    kl: float | None = None  # claim: the loss has this times a KL to the reference added
    entropy: float | None = None  # claim: the loss has this times the entropy subtracted
    chosen_falls: bool = False  # claim of pairs: chosen responses may become less probable, as of APO-down
    low: float | None = None  # claim: tokens with A < 0 stop below a ratio of 1 - low
    high: float | None = None  # claim: tokens with A > 0 stop above a ratio of 1 + high
    json: str = ""  # a file for the certificate


@dataclass(frozen=True)
class Completion:
    """Print the completion of rft for a shell: commands, scripts, and the options of each."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]  # docs/commands.md says where it goes


@dataclass(frozen=True)
class Nothing:
    """No further options."""


class Script(NamedTuple):
    """A script that is to run."""

    path: Path
    arguments: Sequence[str]


class Command(NamedTuple):
    """One command: what it does with its arguments, and their form."""

    start: Callable[[Sequence[str]], Script | None]  # does it, or answers which script is to run
    options: type | None = None  # None: the options of the script of the same name


def new(options: New) -> None:
    """Copy the script and say how to run it, or list the completion."""
    if not options.script:
        print(_script_list())
        return
    path = scripts.copy(options.script, options.to)
    print(
        f"{printer.line(path)}: a copy of {options.script}\nrun it:  {printer.command(['rft', 'run', path])}"
    )


def where(options: Where) -> None:
    """Print the path of a script, and the longest rows of a model."""
    limits.fields(options)
    print(scripts.find(options.script))
    if options.model:
        from rft_fn.tools import longest_rows

        print(longest_rows.text(options.model, lora_rank=options.lora_rank, gigabytes=options.memory))


def launch(options: Launch) -> None:
    """Run the programs of a file, and exit as they did, or render them for a cluster."""
    from rft_fn.tools.launch import kubernetes, local_processes, roles, slurm

    file = Path(options.file)
    if options.to:
        if options.dry_run:
            raise ValueError("dry_run: expected none with --to, which starts nothing")
        render = slurm.render if options.to == "slurm" else kubernetes.render
        try:
            text = render(roles.read(file), file.stem)
        except ValueError as error:
            line = str(error)
            raise ValueError(line if line.startswith(f"{file}: ") else f"{file}: {line}") from None
        if options.out:
            Path(options.out).write_text(text, encoding="utf-8")
        else:
            print(text, end="")
        return
    if options.out:
        raise ValueError(f"out: expected it with --to slurm or --to k8s, got {options.out}")
    if status := local_processes.launch(Path(options.file), dry_run=options.dry_run):
        sys.exit(status)


def plan(options: Plan) -> None:
    """Print the plan of a run, and say where its picture is."""
    from rft_fn.tools.plan import predict

    print(predict.plan(options))
    if options.picture:
        print(f"picture: {options.picture}")


def report(options: Report) -> None:
    """Write the page and say where it is."""
    from rft_fn.tools.page.build import write_page

    if not options.runs:
        raise ValueError("runs: expected the folder of at least one run, got none")
    path = write_page(options.runs, options.out or _page_of(options.runs))
    print(f"report: {path}  ({path.stat().st_size / 1e6:.1f} MB)")


def _page_of(folders: Sequence[str]) -> Path:
    """Return the path of a page that no other runs have."""
    from rft_fn import rng

    if len(folders) == 1:
        return Path(folders[0]) / "report.html"
    name = "_".join(run.name.replace("/", "-") for run in read_all(folders))
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}_{rng.fold_in(0, name):016x}"
    return Path(f"{name}.html")


def watch_run(options: Watch) -> None:
    """Show the run until it ends, or until Ctrl-C."""
    from rft_fn.tools import watch

    try:
        watch.follow(options.run, every=options.every, once=options.once, color=options.color)
    except KeyboardInterrupt:
        print()


def examine(options: Doctor) -> None:
    """Show what the doctor finds; exit with 1 if a required part is wrong."""
    from rft_fn.tools import doctor

    found = doctor.examine(imports=options.imports)
    if options.json:
        print(doctor.as_json(found))
    else:
        doctor.show(found)
    if doctor.wrong(found):
        sys.exit(1)


def migrate(options: Migrate) -> None:
    """Print the translation; exit with 2 for a file that has none."""
    from rft_fn import migrate as translation

    if not options.file and not options.table:
        raise ValueError("file: expected a config or a script to translate, got none")
    words = [options.file] if options.file else []
    for name in ("system", "trainer", "from_version"):
        if getattr(options, name):
            words += [f"--{name.replace('_', '-')}", getattr(options, name)]
    words += ["--table"] if options.table else []
    if status := translation.main(words):
        sys.exit(status)


def certify(options: Certify) -> None:
    """Print the certificate of a loss, and write it; exit with 1 if a check fails."""
    from rft_fn.tools import certify

    found = certify.certificate(
        options.loss,
        weight=options.weight,
        extra=options.extra,
        unit=options.unit,
        on_policy=not options.no_policy,
        low=options.low,
        high=options.high,
        kl=options.kl,
        entropy=options.entropy,
        chosen_falls=options.chosen_falls,
    )
    certify.show(options.loss, found)
    if options.json:
        certify.write(Path(options.json), options.loss, found, options)
        print(f"certificate: {options.json}")
    if any(v.error for v in found.verdicts):
        sys.exit(1)


def complete(options: Completion) -> None:
    """Print the completion."""
    print(scripts.completion(options.shell, words()))


def words() -> scripts.Words:
    """Return all that may follow `rft`: commands, and names of scripts where a command takes one."""
    configs = {name: _with_file(scripts.config(path)) for name, path in scripts.named().items()}
    words: dict[str, scripts.Options | dict[str, scripts.Options]] = {}
    for name, command in COMMANDS.items():
        words[name] = command.options or configs[_script_of(name)]
    names = dict.fromkeys(configs, Nothing)
    words |= {"new": names, "run": configs, "where": names}
    words["completion"] = dict.fromkeys(scripts.SHELLS, Nothing)
    return words


def _with_file(options: type) -> type:
    """Return the options of a script with the file that it takes more of them from."""
    return make_dataclass(
        options.__name__, [("config", str, field(default=""))], bases=(options,), frozen=True
    )


def run_script(args: Sequence[str]) -> Script:
    """Return the script that `rft run` names, with all that follows its name."""
    if args and args[0] in ("-h", "--help"):
        parsing.parse(Run, args, prog="rft run")
    if args and not args[0].startswith("-"):
        return Script(scripts.find(args[0]), args[1:])
    got = "".join(args[:1]) or "none"
    raise ValueError(f"script: expected first one of {', '.join(scripts.named())}, or a .py file, got {got}")


def _script_of(command: str) -> str:
    return command.replace("-", "_")


def _script(name: str, args: Sequence[str]) -> Script:
    return Script(scripts.find(name), args)


def _own(options: type, run: Callable[[Any], None], args: Sequence[str]) -> None:
    """Parse the options of a command, and run it."""
    prog = f"rft {options.__name__.lower()}"
    run(parsing.parse(options, parsing.qualify(args, options), prog=prog))


COMMANDS = {
    "new": Command(partial(_own, New, new), New),
    "run": Command(run_script, Run),
    "where": Command(partial(_own, Where, where), Where),
    "launch": Command(partial(_own, Launch, launch), Launch),
    "plan": Command(partial(_own, Plan, plan), Plan),
    "watch": Command(partial(_own, Watch, watch_run), Watch),
    "report": Command(partial(_own, Report, report), Report),
    "export": Command(partial(_script, "export")),
    "evaluate": Command(partial(_script, "evaluate")),
    "check-engine": Command(partial(_script, "check_engine")),
    "serve-model": Command(partial(_script, "serve_model")),
    "doctor": Command(partial(_own, Doctor, examine), Doctor),
    "migrate": Command(partial(_own, Migrate, migrate), Migrate),
    "certify": Command(partial(_own, Certify, certify), Certify),
    "completion": Command(partial(_own, Completion, complete), Completion),
}
"""Every command by its name; the help is the docstring of its options, or of the script that it runs."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that `args` name; by default `args` are the arguments of this process.

    A user's mistake is one line, and exits with 2. A script runs outside of that, with its errors
    unchanged.
    """
    if args is None:
        args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return
    if args[0] == "--version":
        print(rft_fn.__version__)
        return
    try:
        script = _start(args)
    except Exception as error:
        from rft_fn.run.cli import explain

        explain(error)
        raise
    if script is not None:
        scripts.execute(script.path, script.arguments)


def _start(args: Sequence[str]) -> Script | None:
    name = args[0]
    if name not in COMMANDS:
        # a script is run by its name, and other tools say train
        known = {x: f"run {x}" for x in scripts.named()} | {"train": "run SCRIPT"} | {x: x for x in COMMANDS}
        near = difflib.get_close_matches(name, known, n=1)
        like = "".join(f"; did you mean rft {known[other]}?" for other in near)
        raise ValueError(f"command: expected one of {', '.join(COMMANDS)}, got {name!r}{like}")
    return COMMANDS[name].start(args[1:])


def _usage() -> str:
    """Return the commands as text, each with its first line."""
    about = {}
    for name, command in COMMANDS.items():
        if command.options is None:
            about[name] = scripts.summary(scripts.find(_script_of(name)))
        else:
            about[name] = (command.options.__doc__ or "").partition("\n")[0]
    return "usage: rft COMMAND ...; rft COMMAND --help lists the options\n\n" + _listed(about)


def _script_list() -> str:
    """Return the scripts as text, each with its first line."""
    about = {name: scripts.summary(path) for name, path in scripts.named().items()}
    return "rft new SCRIPT copies one of these, rft run SCRIPT runs it:\n\n" + _listed(about)


def _listed(about: Mapping[str, str]) -> str:
    """Return names and what they are, in lines of at most 80 characters."""
    width = max(map(len, about))
    lines = []
    for name, text in about.items():
        behind = " " * (width + 4)
        lines += textwrap.wrap(text, 80, initial_indent=f"  {name:<{width}}  ", subsequent_indent=behind)
    return "\n".join(lines)
