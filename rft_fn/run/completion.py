"""Completion of `rft` in a shell, by tyro's own generator: words that follow each other, then options."""

import contextlib
import dataclasses
import io
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, Union, get_type_hints

import tyro

from rft_fn.run import parsing

__all__ = ["SHELLS", "Options", "Words", "text"]

SHELLS = ("bash", "zsh", "fish")

Options: TypeAlias = type
Words: TypeAlias = Mapping[str, Options | Mapping[str, Options]]
"""By each word that may come first: the options behind it, or further words with theirs."""

# where nothing of ours fits, a word is a file
_FILES_IN_BASH = """
_rft() {
  _tyro_rft "$@"
  [[ -n "${COMPREPLY[0]}" ]] || COMPREPLY=()
}
complete -o default -F _rft rft
"""

# the words are more than one argument of a process may hold, so fish has to send them as input
_ARGUMENT_IN_FISH = '$python_cmd -c "$pycode" $words $current'
_INPUT_IN_FISH = 'printf "%s" "$pycode" | $python_cmd - $words $current'


def text(shell: str, words: Words) -> str:
    """The completion for bash, zsh or fish of the words that follow `rft`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        tyro.cli(_either(words), prog="rft", args=["--tyro-print-completion", shell])
    if shell == "bash":
        printed.write(_FILES_IN_BASH)
    made = printed.getvalue()
    if shell == "fish":
        made = made.replace(_ARGUMENT_IN_FISH, _INPUT_IN_FISH)
    return made


def _either(words: Words) -> Any:
    """A union of what each word stands for, which tyro takes as subcommands."""
    kinds = []
    for word, behind in words.items():
        if isinstance(behind, Mapping):
            further = Annotated[_either(behind), tyro.conf.arg(name="")]
            behind = dataclasses.make_dataclass(word, [("further", further)])
        else:
            behind = _with_short_names(behind)
        kinds.append(Annotated[behind, tyro.conf.subcommand(word, prefix_name=False)])
    return Union[tuple(kinds)]  # noqa: UP007


def _with_short_names(options: type) -> type:
    """The options, where --PART.NAME is also --NAME as on the command line."""
    hints = get_type_hints(options, include_extras=True)
    owners = parsing.owners(options)
    fields = []
    for f in dataclasses.fields(options):
        if dataclasses.is_dataclass(hints[f.name]):
            alone = [name for name, parts in owners.items() if parts == [f"{f.name}."]]
            part = _named_twice(hints[f.name], alone)
            fields.append((f.name, part, dataclasses.field(default_factory=part)))
    if not fields:
        return options
    return dataclasses.make_dataclass(options.__name__, fields, bases=(options,), frozen=True)


def _named_twice(part: type, names: list[str]) -> Any:
    """The part of a config with an alias without the part's name for each of `names`."""
    hints = get_type_hints(part, include_extras=True)
    fields = []
    for f in dataclasses.fields(part):
        if f.name in names:
            alias = tyro.conf.arg(aliases=[f"--{f.name.replace('_', '-')}"])
            fields.append((f.name, Annotated[hints[f.name], alias], f))
    return dataclasses.make_dataclass(part.__name__, fields, bases=(part,), frozen=True)
