"""The commands of a shell script with the values of its variables; nothing is run.

What is read: assignments, arrays, `${X:-default}` and the other forms of a variable, `$((...))`, quotes,
continued lines, here-documents, conditions that only compare texts or numbers, functions with the arguments
of each call, and the commands within `bash -c` and `eval`. A pipe, a redirection and `&` end a command. What
has no value stays as it is written.
"""

import operator
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from rft_fn.migrate.shell_values import changed, closed, nested, number

__all__ = ["Command", "commands"]


class Command(NamedTuple):
    """One command of a script."""

    words: list[str]
    line: int  # in which it begins, from 1
    unknown: dict[str, int]  # texts in its words that no line of the script gives a value -> their line
    loops: list[str]  # variables of loops around it, which has the first value of each


_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")
_FUNCTION = re.compile(r"(?:function\s+([\w-]+)\s*(?:\(\s*\))?|([A-Za-z_][\w-]*)\s*\(\s*\))\s*\{(?=\s)")
_WHOLE = re.compile(r"\$'|\$\{\w+:?[-=+]['\"]")  # what is quoted within an expansion is not split
_HOME = re.compile(r"((?:[A-Za-z_]\w*=)?)~(?=[/\s;&|()<>]|$)")
_REDIRECTED = re.compile(r"(?:\d*|&)(?:>>|>&|>|<<<|<<-?|<)")
_DECLARE = ("export", "readonly", "local", "declare", "typeset")
_OF_THE_SHELL = {"HOME", "PWD", "USER", "HOSTNAME"}  # any shell has them
_MOST = 20_000  # characters that a variable may grow to
_DEPTH = 5  # of commands within texts
_BEFORE_COMMANDS = (["then"], ["else"], ["do"], ["{"], ["!"], ["time"])
_ESCAPED = {"n": "\n", "t": "\t"}  # in $'...'
_SPACE = "\ue000"  # a space within a text without a value, at which no word ends

Value = str | list[str]  # an array is a list


def commands(text: str) -> list[Command]:
    """Return the commands of a script in their order; ValueError for a text that is no shell script."""
    reader = _Reader(text.replace("\r\n", "\n"), None, 1)
    reader.run()
    for name, (body, line) in list(reader.functions.items()):
        if name not in reader.called:  # as where "$@" or a name in a variable calls it
            reader.inside(body, line)
    return reader.found


class _Reader:
    """Reads a script from its first character to its last."""

    def __init__(self, text: str, outer: "_Reader | None", first: int) -> None:
        self.text, self.i, self.first = text, 0, first
        self.depth: int = outer.depth if outer else 0
        self.variables: dict[str, Value] = outer.variables if outer else {}
        self.lines: dict[str, int] = outer.lines if outer else {}
        self.functions: dict[str, tuple[str, int]] = outer.functions if outer else {}  # bodies, their lines
        self.called: set[str] = outer.called if outer else set()
        self.arguments: list[str] | None = outer.arguments if outer else None  # of a function's call
        self.found: list[Command] = []
        self.branches: list[list[bool]] = []  # of open ifs: whether this branch is read, whether one was
        self.documents: list[tuple[str, bool, str]] = []  # (end, whether it is expanded, variable) to come
        self.loops: list[str] = []  # open loops: the variable that has more values than one; else empty
        self.status: bool | None = True  # of the last command; None is not known

    def run(self) -> None:
        """Read all commands."""
        while self.i < len(self.text):
            line = self.line()
            words, assigned, end = self.command()
            if words or assigned:
                self.act(words, assigned, line)
            if end == "&&" and self.status is False:
                self.command()
            if end == "||" and self.status is not False:
                self.command()

    def line(self) -> int:
        return self.text.count("\n", 0, self.i) + self.first

    def command(self) -> tuple[list[str], list[tuple[str, str, Value]], str]:
        """Return the words of the next command, the assignments before them, and what ended it."""
        words: list[str] = []
        assigned: list[tuple[str, str, Value]] = []
        while self.i < len(self.text):
            rest = self.text[self.i :]
            c = rest[0]
            if c in " \t":
                self.i += 1
            elif not words and not assigned and (match := _FUNCTION.match(rest)) and self.define(match):
                pass
            elif rest.startswith("\\\n") or rest == "\\":  # the end of a script ends the line too
                self.i += 2
            elif c == "#":
                end = rest.find("\n") if "\n" in rest else len(rest)
                # an option that was commented out within a command: the command goes on
                self.i += end + (1 if words and rest[:end].rstrip().endswith("\\") else 0)
            elif c == "\n":
                self.i += 1
                self.here_documents(words)
                return words, assigned, c
            elif match := re.match(r"&&|\|\||;;|;|\|&|\|", rest):
                self.i += match.end()
                if match[0] in ("|", "|&"):
                    self.command()  # what reads the output
                return words, assigned, match[0]
            elif match := _REDIRECTED.match(rest):
                self.i += match.end()
                self.redirect(match[0], words)
            elif c in "&()":
                self.i += 1
                return words, assigned, c
            elif (not words or words[0] in _DECLARE) and (match := _ASSIGNED.match(rest)):
                self.i += match.end()
                value = self.value()
                if match[2] and isinstance(value, str):  # NAME[KEY]=value
                    assigned.append((match[1], "+", [f"{match[2]}={value}"]))
                else:
                    assigned.append((match[1], match[3], value))
            else:
                words += self.word()
                if words in _BEFORE_COMMANDS:  # what follows is a command of its own
                    if words == ["else"]:
                        self.branch("else", [])
                    words = []
        return words, assigned, ""

    def value(self) -> Value:
        """Return the right side of an assignment."""
        if self.text[self.i : self.i + 1] != "(":
            return " ".join(self.word(split=False)) if self.at_word() else ""
        self.i += 1
        items: list[str] = []
        while self.i < len(self.text) and self.text[self.i] != ")":
            c = self.text[self.i]
            if c in " \t\n\\" and (c != "\\" or self.text[self.i + 1 : self.i + 2] == "\n"):
                self.i += 1
            elif c == "#":
                self.i = self.text.find("\n", self.i) % (len(self.text) + 1)
            elif c in "&;|<>":
                self.i += 1
            else:
                items += self.word()
        self.i += 1
        return items

    def at_word(self) -> bool:
        return self.i < len(self.text) and self.text[self.i] not in " \t\n;&|<>()"

    def redirect(self, mark: str, words: list[str]) -> None:
        """Leave out the target of a redirection; note a here-document."""
        while self.text[self.i : self.i + 1] in (" ", "\t"):
            self.i += 1
        if self.text[self.i : self.i + 1] == "&":
            self.i += 1
        quoted = self.text[self.i : self.i + 1] in ("'", '"', "\\")
        target = "".join(self.word()) if self.at_word() else ""
        if mark.rstrip("-").endswith("<<") and not mark.endswith("<<<"):
            name = words[-1] if words[:1] == ["read"] else ""
            self.documents.append((target, not quoted, name))

    def here_documents(self, words: list[str]) -> None:
        """Read the here-documents of the line that has ended."""
        for end, expanded, name in self.documents:
            match = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.M).search(self.text, self.i)
            body = self.text[self.i : match.start() if match else len(self.text)]
            line = self.line()
            self.i = match.end() if match else len(self.text)
            body = self.expanded(body, line) if expanded else body
            if name:
                self.variables[name] = body.strip(" \t\n")  # as `read` does
                self.lines[name] = line
            elif words and words[0] in ("bash", "sh"):
                self.inside(body, line)
        self.documents = []

    def expanded(self, text: str, line: int) -> str:
        """Return a text as within double quotes."""
        inner = _Reader(text.replace("\\\n", " "), self, line)
        parts = inner.quoted(stop="")
        return " ".join(parts)

    def inside(self, text: str, line: int, arguments: list[str] | None = None) -> None:
        """Read the commands in a text, as of `bash -c`, or of a function with the arguments of its call."""
        if self.depth < _DEPTH:
            inner = _Reader(text, self, line)
            inner.depth += 1
            inner.arguments = self.arguments if arguments is None else arguments
            inner.run()
            loops = [x for x in self.loops if x]
            self.found += [x._replace(loops=[*loops, *x.loops]) for x in inner.found]

    def define(self, match: re.Match[str]) -> bool:
        """Note a function; False for one without an end that can be found."""
        start = self.i + match.end()
        try:
            end = closed(self.text, start - 1, "{", "}")
        except ValueError:  # as for a quote in a comment
            return False
        self.i = start
        self.functions[match[1] or match[2]] = self.text[start : end - 1], self.line()
        self.i = end
        return True

    def act(self, words: list[str], assigned: list[tuple[str, str, Value]], line: int) -> None:
        """Do what a command does to variables and to the branch that is read, or note it."""
        ended = 0
        while words and words[0] in ("}", "done", "esac"):
            ended += words[0] == "done"
            words = words[1:]
        first = words[0] if words else ""
        if all(read for read, _ in self.branches):
            self.loops = self.loops[: len(self.loops) - ended]
            if first in ("for", "while", "until"):
                self.loops.append(words[1] if first == "for" and len(words) > 4 else "")
        if first in ("if", "elif", "fi", "while", "until"):
            self.branch(first, words[1:])
            return
        if not all(read for read, _ in self.branches):
            return
        if first == "for" and len(words) > 2:
            self.assign(words[1], "", words[3] if len(words) > 3 else "", line)
        elif first == "case":
            end = re.compile(r"\besac\b").search(self.text, self.i)
            self.i = end.end() if end else self.i
        elif first in ("[", "[[", "test"):
            self.status = self.test(words)
        elif first == "shift":
            count = int(words[1]) if words[1:] and words[1].isdigit() else 1
            self.arguments = self.arguments and self.arguments[count:]
        elif first in self.functions:
            self.called.add(first)
            self.inside(*self.functions[first], [word.replace(_SPACE, " ") for word in words[1:]])
        elif not words or first in _DECLARE:
            for name, more, value in assigned:
                self.assign(name, more, value, line)
        else:
            self.status = None
            inner = nested([word.replace(_SPACE, " ") for word in words])
            if inner is not None:
                self.inside(inner, line)
            elif first not in ("echo", "printf", "read", "cat", "export", ":"):
                words = [word.replace(_SPACE, " ") for word in words]
                shown = " ".join(words)
                unknown = {x: n for x, n in self.lines.items() if x[0] in "$`" and x in shown}
                self.found.append(Command(words, line, unknown, [x for x in self.loops if x]))

    def assign(self, name: str, more: str, value: Value, line: int) -> None:
        """Assign to a variable, or with `more` append to its value."""
        before = self.variables.get(name, [] if isinstance(value, list) else "")
        if more and isinstance(before, list):
            value = [*before, *(value if isinstance(value, list) else [value])]
        elif more and isinstance(value, str):
            value = f"{before}{value}"
        if sum(map(len, value)) > _MOST:
            raise ValueError(f"line {line}: {name} grows to more than {_MOST} characters")
        self.variables[name] = value
        self.lines[name] = line

    def branch(self, word: str, condition: Sequence[str]) -> None:
        """Enter, change or leave a branch."""
        if word == "fi":
            self.branches[-1:] = []
        elif word == "else" and self.branches:
            self.branches[-1][0] = not self.branches[-1][1]
        elif word in ("if", "elif"):
            # a condition that cannot be known holds
            holds = self.test(condition) is not False
            if word == "if":
                self.branches.append([holds, holds])
            elif self.branches:
                read = holds and not self.branches[-1][1]
                self.branches[-1] = [read, read or self.branches[-1][1]]

    def test(self, words: Sequence[str]) -> bool | None:
        """Return whether a condition holds; None where that cannot be known."""
        x = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
        if x[:1] == ["!"]:
            holds = self.test(x[1:])
            return None if holds is None else not holds
        if any(word in ("-a", "-o", "&&", "||") for word in x):
            return None
        if any("$#" in word for word in x):
            return False  # as if it were called with the arguments that it needs
        plain = ["" if word.startswith("$") else word for word in x]  # what has no value is empty
        if len(x) == 2 and x[0] in ("-z", "-n"):
            return (plain[1] == "") == (x[0] == "-z")
        if len(x) == 2 and x[0] in ("-d", "-f", "-e", "-s", "-x"):
            return False
        if len(x) == 1:
            return {"true": True, "false": False}.get(x[0])
        if len(x) != 3:
            return None
        if x[1] in ("=", "==", "!="):
            return fnmatchcase(plain[0], plain[2]) == (x[1] != "!=")
        compare = {
            "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le,
            "-gt": operator.gt, "-ge": operator.ge,
        }.get(x[1])  # fmt: skip
        if compare is None or not all(re.fullmatch(r"-?\d{1,18}", word) for word in (x[0], x[2])):
            return None
        return compare(int(x[0]), int(x[2]))

    def word(self, *, split: bool = True) -> list[str]:
        """Return the next word, or the words that it expands to."""
        fields, some = [""], False  # some: even an empty word is one
        if home := _HOME.match(self.text, self.i):  # a tilde, also behind NAME=
            self.i = home.end()
            fields = [f"{home[1]}${{HOME}}"]
        while self.at_word():
            c = self.text[self.i]
            if c == "\\":
                escaped = self.text[self.i + 1 : self.i + 2]
                self.i += 2
                if escaped != "\n":  # a continued line goes on in the word
                    fields[-1], some = fields[-1] + escaped, True
            elif c == "'":
                end = self.text.find("'", self.i + 1)
                if end < 0:
                    raise ValueError(f"line {self.line()}: a quote without its end")
                fields[-1] += self.text[self.i + 1 : end]
                self.i, some = end + 1, True
            elif c == '"':
                self.i += 1
                parts = self.quoted()
                some = some or bool(parts)
                fields = [*fields[:-1], fields[-1] + "".join(parts[:1]), *parts[1:]]
            elif c == "$" or c == "`":
                whole = not split or _WHOLE.match(self.text, self.i) is not None
                for k, part in enumerate(self.expansion(quoted=False)):
                    pieces = [part] if whole or part.startswith("$") else part.split()
                    if k or (pieces and part[:1].isspace() and fields[-1]):
                        fields.append("")
                    fields = [*fields[:-1], fields[-1] + "".join(pieces[:1]), *pieces[1:]]
            else:
                fields[-1] += c
                self.i += 1
        return fields if some else [x for x in fields if x]

    def quoted(self, stop: str = '"') -> list[str]:
        """Return the text up to the end of double quotes; an array in it has several."""
        fields, only_array = [""], True
        while self.i < len(self.text) and self.text[self.i] != stop:
            c = self.text[self.i]
            if c == "\\" and self.text[self.i + 1 : self.i + 2] in ('"', "$", "`", "\\", "\n"):
                fields[-1] += self.text[self.i + 1].replace("\n", "")
                self.i += 2
                only_array = False
            elif c in "$`":
                parts = self.expansion(quoted=True)
                only_array = only_array and not parts
                fields = [*fields[:-1], fields[-1] + "".join(parts[:1]), *parts[1:]]
            else:
                fields[-1] += c
                self.i += 1
                only_array = False
        if stop and self.i >= len(self.text):
            raise ValueError(f"line {self.line()}: a quote without its end")
        empty = self.i and self.text[self.i - 1] == '"' and fields == [""]  # "" is a word
        self.i += 1
        return [] if only_array and fields == [""] and not empty else fields

    def expansion(self, *, quoted: bool) -> list[str]:
        """Return the texts of what begins with $ or ` here."""
        start, line = self.i, self.line()
        rest = self.text[start:]
        if rest.startswith("$(("):
            end = closed(self.text, start + 1, "(", ")")
            self.i = end
            inner = self.expanded(self.text[start + 3 : end - 2], line)
            found = number(inner, self.variables)
            return [self.kept(self.text[start:end], line) if found is None else str(found)]
        if rest.startswith("$("):
            self.i = end = closed(self.text, start + 1, "(", ")")
            return [self.output(self.text[start + 2 : end - 1], self.text[start:end], line)]
        if rest[0] == "`":
            end = self.text.find("`", start + 1)
            self.i = end + 1 if end > 0 else len(self.text)
            if rest[1:].lstrip().startswith("#"):  # a comment within a command
                return []
            return [self.output(self.text[start + 1 : self.i - 1], self.text[start : self.i], line)]
        if rest.startswith("${"):
            self.i = end = closed(self.text, start + 1, "{", "}")
            return self.braced(self.text[start + 2 : end - 1], line, quoted=quoted)
        if match := _NAME.match(rest, 1):
            self.i += match.end()
            return self.of(match[0], line, quoted=quoted)
        if rest[1:2] and (rest[1] in "@*#?$!-" or rest[1].isdigit()):
            self.i += 2
            return self.argument(rest[1], "", line, quoted=quoted)
        if match := re.match(r"\$'((?:\\.|[^'\\])*)'", rest, re.S):
            self.i += match.end()
            return [re.sub(r"\\(.)", lambda x: _ESCAPED.get(x[1], x[1]), match[1], flags=re.S)]
        self.i += 1
        return ["$"]

    def kept(self, text: str, line: int) -> str:
        """Note a text that has no value, and return it."""
        text = " ".join(text.split())
        if text.strip("${}") not in _OF_THE_SHELL:
            self.lines.setdefault(text, line)
        return text.replace(" ", _SPACE)

    def of(self, name: str, line: int, *, quoted: bool, index: str = "") -> list[str]:
        """Return the values of a variable; its name where it has none."""
        value = self.variables.get(name)
        if value is None:
            return [] if index in ("@", "*") else [self.kept(f"${{{name}}}", line)]
        if isinstance(value, str):
            return [value]
        plain = [re.sub(r"^\[\w+\]=", "", x) for x in value]
        if index == "@" or (index == "*" and not quoted):
            return plain
        if index == "*":
            return [" ".join(plain)]
        index = self.expanded_word(index, line)
        if index in self.variables:  # of an array whose keys are numbers
            index = " ".join(self.of(index, line, quoted=True))
        if keyed := [item for x, item in zip(value, plain) if x.startswith(f"[{index}]=")]:
            return keyed[-1:]
        if index and not index.isdigit():
            return [self.kept(f"${{{name}[{index}]}}", line)]
        return plain[int(index or 0) : int(index or 0) + 1]

    def argument(self, name: str, rest: str, line: int, *, quoted: bool) -> list[str]:
        """Return an argument of a function, or all of them from the one that `rest` names, as in ${@:2}."""
        given = self.arguments
        if name in "@*":
            start = int(rest[1:]) - 1 if re.fullmatch(r":[1-9]\d*", rest) else 0
            found = (given or [])[start:]
            return [" ".join(found)] if name == "*" and quoted and given is not None else found
        if given is not None and name == "#":
            return [str(len(given))]
        found = given[int(name) - 1 : int(name)] if given and name.isdigit() and int(name) else []
        return found or [self.kept(f"${name}" if len(name) == 1 else f"${{{name}}}", line)]

    def braced(self, inner: str, line: int, *, quoted: bool) -> list[str]:
        """Return the texts of ${...}."""
        match = re.match(r"([A-Za-z_]\w*|\d+|[@*#])(?:\[([^]]*)\])?", inner)
        whole = f"${{{inner}}}"
        if match is None:
            return [self.kept(whole, line)]
        name, index, rest = match[1], match[2] or "", inner[match.end() :]
        if name in "@*" or (name.isdigit() and not rest):
            return self.argument(name, rest, line, quoted=quoted)
        known = name in self.variables
        values = self.of(name, line, quoted=quoted, index=index) if known else []
        if name.isdigit() and self.arguments:
            values = self.arguments[int(name) - 1 : int(name)] if int(name) else []
            known = bool(values)
        if not rest:
            return values if known else self.of(name, line, quoted=quoted, index=index)

        # a default, or another text in its place
        if found := re.match(r":?([-=+?])", rest):
            filled = known and (values != [""] or not rest.startswith(":"))
            text = rest[found.end() :]
            other = self.expanded(text, line) if quoted else self.expanded_word(text, line)
            if found[1] == "+":
                return [other] if filled else []
            if filled or found[1] == "?":
                return values or [self.kept(f"${{{name}}}", line)]
            if found[1] == "=":
                self.assign(name, "", other, line)
            return [other]
        if not known:
            return [self.kept(whole, line)]
        made = [changed(x, rest, partial_of=lambda text: self.expanded(text, line)) for x in values]
        return [self.kept(whole, line) if x is None else x for x in made]

    def expanded_word(self, text: str, line: int) -> str:
        """Return the default in ${X:-default}, which may have quotes."""
        inner = _Reader(text, self, line)
        parts = []
        while inner.i < len(text):
            if inner.at_word():
                parts += inner.word(split=False)
            else:
                parts.append(text[inner.i])
                inner.i += 1
        return "".join(parts)

    def output(self, inner: str, whole: str, line: int) -> str:
        """Return the output of basename, dirname, pwd or cat <<EOF in $( ); any other as it is written."""
        if match := re.match(r"\s*cat\s*<<-?\s*(['\"]?)(\w+)\1[ \t]*\n(.*)\n[ \t]*\2\s*$", inner, re.S):
            return match[3] if match[1] else self.expanded(match[3], line)
        words = inner.split()
        if words == ["pwd"]:
            return "."
        if len(words) in (2, 3) and words[0] in ("basename", "dirname"):
            path = self.expanded_word(words[1], line).rstrip("/")
            if "$" not in path:
                head, _, tail = path.rpartition("/")
                ending = words[2].strip("'\"") if len(words) == 3 else ""
                return tail.removesuffix(ending) if words[0] == "basename" else head or "."
        return self.kept(whole, line)
