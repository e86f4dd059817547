r"""Compare an answer with a reference as mathematics, with a limit of seconds in any thread.

What math-verify is asked is cleaned first: a reference "$7.$", "7 apples.", "2+5=7", "(A) 7" or "The answer
is 7." is 7, and so is such an answer. What it says is guarded: it takes letters for variables ("cat" would be
"act"), rounds to six decimals (any two small numbers are equal) and drops units ("5 cm" would be "5 m").

Its limit is a signal, which only the main thread gets. Other threads, and all of them where there are many
answers, ask child processes, which run this file as a script: it imports nothing of the library.
"""

import contextlib
import json
import math
import os
import queue
import re
import select
import subprocess
import sys
import threading
import time
import unicodedata
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = [
    "Question", "begin_all", "close", "equal", "equal_all", "extract_number", "kind_of", "parses", "value_of",
    "whole_value",
]  # fmt: skip


_FRAC = re.compile(r"(?<![0-9])\\[dt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
_UNSIGNED = rf"(?:{_DIGITS})(?:[eE][+-]?[0-9]+)?"
# A minus is a sign only where nothing comes before it that it could be subtracted from: "3-5" ends in 5.
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}.%])-\\?\$?)?{_UNSIGNED}(?:/{_UNSIGNED})?")


def extract_number(text: str) -> str | None:
    r"""Return the last number in the text, as "-3.5", "1234", "1/2" or "1e5"; None where there is none.

    Thousands commas, currency signs and a full stop after the number are dropped; "1/2" and "\frac{1}{2}" are
    one number. It reads plain numbers, not formulas: of "2\sqrt{3}" it returns "3" (use `math` for those).
    """
    matches = [match[0] for match in _NUMBER.finditer(_plain(text))]
    return re.sub(r"[,$\\]", "", matches[-1]) if matches else None


def _plain(text: str) -> str:
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    text = re.sub(r"(\\[dt]?frac)\s*([0-9])", r"\1{\2}", text)  # \frac12
    text = re.sub(r"(\\[dt]?frac\s*\{[0-9\s]*\})\s*([0-9])", r"\1{\2}", text)
    return _FRAC.sub(r"\1/\2", text)


def value_of(number: str | None) -> Fraction | None:
    """Return the exact value of a number; None for no number, for n/0 and for absurdly large ones."""
    if number is None or len(number) > 200 or re.search(r"[eE][+-]?[0-9]{4}", number):
        return None  # Fraction("1e999999999") would fill the memory
    top, _, bottom = number.partition("/")
    divisor = Fraction(bottom or 1)
    return Fraction(top) / divisor if divisor else None


_POWER = re.compile(
    r"\s*(?:\\times|\\cdot|\u00d7|\*|(?<=\s)x(?=\s))\s*10\s*(?:\^|\*\*)\s*\{?\s*([+-]?[0-9]+)\s*\}?$"
)


def whole_value(text: str) -> Fraction | None:
    """Return the value of a text that is one plain number, also with a power of ten; None for any other."""
    plain = re.sub(r"[$\\]", "", _POWER.sub(r"e\1", _plain(text).strip().removeprefix("+")))
    return value_of(plain.replace(",", "")) if _NUMBER.fullmatch(plain) else None  # "1,2" are two


_ROUNDED = Fraction(1, 10**6)


def close(a: Fraction, b: Fraction) -> bool:
    """Return whether two numbers are equal: whole ones exactly, others but for rounding.

    |a - b| <= 1e-6 min(1, s) with s the larger of |a| and |b|: six decimals, and for numbers below 1 six
    digits.
    """
    if a == b or (a.denominator == 1 and b.denominator == 1):
        return a == b
    return abs(a - b) <= _ROUNDED * min(1, max(abs(a), abs(b)))


_FONT = "text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)"
_WRAPPED = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$?([^$]*)\$\$?", r"\\\((.*)\\\)", r"\\\[(.*)\\\]", r"\*\*([^*]*)\*\*",
        rf"\\(?:{_FONT}|mbox|fbox|boldsymbol|bm|underline|textcolor\s*\{{\w+\}})\s*\{{([^{{}}]*)\}}",
    )
]  # fmt: skip
_CURRENCY = (
    r"(?:(?:\bUS)?\\?\$|[\u20ac\u00a3\u00a5\u20b9\u00a2]|\b(?:USD|EUR|GBP|INR|CHF|Rs\b\.?)(?=\s*[0-9.]))"
)
_MONEY = re.compile(rf"(-?)\s*{_CURRENCY}\s*(?=[0-9.])|(?<=[0-9])\s*{_CURRENCY}$")
_LABEL = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:])\s*(.*)", re.DOTALL)
_MARKED_LABEL = re.compile(
    rf"(?:\\(?:{_FONT})\s*\{{\s*(?P<in>\([A-Z]\)|[A-Z][).:])\s*\}}"
    r"|(?i:option|choice)\s+(?P<of>\([A-Z]\)|[A-Z]\b)[.:]?)(?:\\[ ,;:]|\\q?quad\b|[~\s])*"
)
_SAID = re.compile(
    r"(?:(?:so|thus|hence|therefore)\b\W*)?(?:the\s+)?(?:(?:final|correct|right)\s+)?(?:answer|ans|result|solution)"
    r"\s*(?:is\b|:|=)\s*:?\s*(.+)",
    re.DOTALL | re.IGNORECASE,
)
_MIXED = re.compile(r"(-?[0-9]+)\s+([0-9]+)/([0-9]+)")
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})(?:\s*([ap])\.?\s?m\.?)?", re.IGNORECASE)
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}|[0-9]{1,2}/[0-9]{1,2}/[0-9]{4}")
_IN_BASE = re.compile(r"([0-9A-F]+)_\{?([0-9]+)\}?")
_WORDS = re.compile(r"[^\W\d_]{3,}(?:[\s'-]+[^\W\d_]+)*|[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*[\s'-]+[^\W\d_]{3,}")
_VARIABLES = re.compile(r"[u-z\s]*|.*\b(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt|pi|inf)\b.*", re.IGNORECASE)
_UNIT = re.compile(
    rf"(?P<number>-?(?:[0-9]+\s+(?=[0-9]+/))?(?:{_UNSIGNED})(?:/[0-9]+)?)(?P<gap>[\s~]*)(?P<unit>[^\W\d_][^\W\d_/^.\s]*"
    r"(?:\s*[/^]\s*\{?[\w.]+\}?|[\s.]+[^\W\d_]+)*)"
)
_TEXT_IN = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*)\}")

# names of one unit, the first one is the one that is compared
_UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "dm decimeter decimetre", "m meter metre",
        "km kilometer kilometre", "in inch inches", "ft foot feet", "yd yard", "mi mile", "nm nanometer",
        "mg milligram", "g gram", "kg kilogram", "lb lbs pound", "oz ounce", "t ton tonne",
        "ml milliliter millilitre", "l liter litre", "ms millisecond", "s sec second", "min minute",
        "h hr hrs hour", "d day", "week", "month", "yr year", "km/h kmh kph", "m/s", "mph", "hz hertz",
        "n newton", "j joule", "kj kilojoule", "w watt", "kw kilowatt", "v volt", "a amp ampere", "ohm",
        "pa pascal", "kpa kilopascal", "mol mole", "c celsius", "f fahrenheit", "k kelvin", "rad radian",
        "deg degree", "cent", "dollar usd", "euro eur",
    )
    for name in names.split()
}  # fmt: skip
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

# characters and commands that math-verify does not read, as it does
_SIGNS: dict[str | int, str] = {
    "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00d7": r"\times ",
    "\u00b7": r"\cdot ", **{0xFF10 + i: str(i) for i in range(10)},
}  # fmt: skip
_POWERS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_COMMANDS = {
    "langle": "(",
    "rangle": ")",
    "lbrace": r"\{",
    "rbrace": r"\}",
    "varnothing": r"\emptyset",
    "mid": "|",
}
_THOUSANDS = re.compile(r"(?<![\w.,^{])[0-9]{1,3}((?:\\[,;:! ]|[~\s])[0-9]{3})+(?![0-9/]|\s*\\?[/f])")


def _latex(text: str) -> str:
    """Return a text with its signs, roots, powers, fractions and repeating decimals in LaTeX."""
    text = re.sub(r"\s{2,}", lambda x: "\n" if "\n" in x[0] else " ", text.translate(str.maketrans(_SIGNS)))
    text = re.sub(
        "[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+", lambda x: f"^{{{x[0].translate(_POWERS)}}}", text
    )
    text = re.sub("\u221a\\s*([0-9.]+|\\w)", r"\\sqrt{\1}", text)
    text = re.sub("[\u00bc-\u00be\u2150-\u215e]", _vulgar, text)
    text = re.sub(
        r"([0-9]{0,30})\.([0-9]{0,30})\\(?:overline|dot)\s*\{\s*([0-9]{1,30})\s*\}", _repeating, text
    )
    text = re.sub(rf"(?<!\\)\\[,;: ](?=\s*\\(?:{_FONT})\b)|(?<=\}})\s*\\[,;:](?=\s)", " ", text)
    text = re.sub(rf"(\\(?:{_FONT}|mbox))\s+\{{", r"\1{", text)
    text = re.sub(r"\\operatorname\*?\s*\{(\w+)\}", r"\\\1 ", text)
    text = re.sub(rf"\\({'|'.join(_COMMANDS)})\b\s*", lambda x: _COMMANDS[x[1]], text)
    text = re.sub(r"(?<=[0-9])[eE]([+-]?[0-9]+)\b", r"\\times 10^{\1}", text)
    text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi", text)
    return re.sub(r"(?<=[\w)])\*\*(?=[\w(-])", "^", text)


def _vulgar(sign: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", sign[0]).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _repeating(number: re.Match[str]) -> str:
    """Return 1.2\\overline{3} as the fraction 111/90."""
    whole, once, again = number.groups()
    top = int(whole + once + again) - int(whole + once or 0)
    return rf"\frac{{{top}}}{{{(10 ** len(again) - 1) * 10 ** len(once)}}}"


class _Read(NamedTuple):
    """A text, as it is compared."""

    whole: str  # without marks around it
    core: str  # without its label, its unit and the arithmetic before its last "="
    label: str = ""  # of a choice
    unit: str = ""  # where it is a known one


@lru_cache(maxsize=4096)
def _read(text: str) -> _Read:
    """Return what of a text is compared."""
    whole = _unwrapped(_THOUSANDS.sub(lambda x: re.sub("[^0-9]", "", x[0]), _latex(text)))
    core, label, unit = whole, "", ""
    if match := _SAID.fullmatch(core):
        core = whole = _unwrapped(match[1])
    if match := _MARKED_LABEL.match(core):
        core = f"({(match['in'] or match['of']).strip('().:')}) {core[match.end() :]}"
    if match := _LABEL.fullmatch(core):
        label = match[1] or match[2]
        core = _unwrapped(match[3]) or label
    if match := re.fullmatch(r"(.*[^<>!=:])=\s*([^=<>]+)", core, re.DOTALL):
        left = re.sub(r"\\[a-zA-Z]+", "", match[1])
        if not re.search(r"[^\W\d_]", left) and r"\ne" not in match[1]:
            core = _unwrapped(match[2])
    if match := _UNIT.fullmatch(_TEXT_IN.sub(r" \1", _plain(core)).strip()):
        name = re.sub(r"\s*([/^])\s*|[{}]", r"\1", match["unit"].strip(" .").casefold())
        base, raised, power = name.partition("^")
        known = _UNITS.get(base) or _UNITS.get(base.removesuffix("s")) or ""
        words = bool(match["gap"]) and len(match["unit"]) > 2 and not _VARIABLES.fullmatch(match["unit"])
        scale = _SCALES.get(name.split()[0])
        if scale and "/" not in match["number"]:
            core = rf"{match['number']}\times 10^{{{scale}}}"
        elif name in ("percent", "per cent"):
            core = f"{match['number']}%"
        elif known and (len(name) > 1 or match["gap"]):
            core, unit = match["number"], known + raised + power
        elif words:
            core = match["number"]
    if match := _MIXED.fullmatch(core):
        core = rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}"
    return _Read(whole, core, label, unit)


def _unwrapped(text: str) -> str:
    """Return a text without what is written around it: dollars, boxes of text, a full stop, a currency."""
    before = None
    while text != before:
        before = text
        text = text.strip()
        while end := next((x for x in ("\\\\", r"\,", "\N{DEGREE SIGN}") if text.endswith(x)), ""):
            text = text.removesuffix(end).rstrip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1]
        for pattern in _WRAPPED:
            if match := pattern.fullmatch(text):
                text = match[1]
        text = _MONEY.sub(lambda match: match[1] or "", text)
    return text


def _tight(text: str) -> str:
    """Return a text without the spaces that part no words and numbers."""
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", text)


def _is_words(text: str) -> bool:
    return bool(_WORDS.fullmatch(text)) and not _VARIABLES.fullmatch(text)


def _told_by_text(reference: _Read, answer: _Read) -> bool | None:
    """Return the verdict that needs no mathematics; None where it needs some."""
    if _tight(reference.whole) == _tight(answer.whole):
        return bool(reference.whole)
    both = reference, answer
    letters = [bool(re.fullmatch("[A-Z]", x.core)) for x in both]
    if any(letters) and all(x.label or letter for x, letter in zip(both, letters)):
        return (reference.label or reference.core) == (answer.label or answer.core)
    if _DATE.fullmatch(reference.whole):
        days = [[*map(int, re.findall("[0-9]+", x.whole))] if _DATE.fullmatch(x.whole) else [] for x in both]
        return days[0] == days[1]
    bases = [_IN_BASE.fullmatch(x.core) for x in both]
    if bases[0] and bases[1]:
        return bases[0].groups() == bases[1].groups()
    clocks = _CLOCK.fullmatch(reference.whole), _CLOCK.fullmatch(answer.whole)
    if clocks[0] and clocks[1] and (clocks[0][3] or clocks[1][3]):
        times = [(int(x[1]), x[2], (x[3] or "").lower()) for x in clocks if x]
        return times[0][:2] == times[1][:2] and (
            times[0][2] == times[1][2] or "" in (times[0][2], times[1][2])
        )
    if _is_words(reference.core) and _is_words(answer.core):
        return reference.core.casefold().split() == answer.core.casefold().split()
    if reference.unit and answer.unit and reference.unit != answer.unit:
        return False
    cores = reference.core, answer.core
    right, given = (whole_value(x.rstrip("%\\ ") if x.endswith("%") else x) for x in cores)
    if right is None or given is None:
        return None
    if cores[0].endswith("%") == cores[1].endswith("%"):
        return close(right, given)
    # 50% is 0.5, and 50 where percents are asked for
    one_percent = (1, 100) if cores[0].endswith("%") else (100, 1)
    return close(right, given) or close(right * one_percent[0], given * one_percent[1])


def kind_of(reference: str) -> str:
    """Return the kind of a reference, in a word or two, from its text."""
    read = _read(reference)
    if not read.whole:
        return "nothing"
    if _CLOCK.fullmatch(read.whole):
        return "a time"
    if whole_value(read.core) is not None:
        return "a number" if read.core == read.whole else "a number in words or marks"
    if re.fullmatch(r"\(?[A-Z]\)?", read.whole) or read.label:
        return "a choice"
    return "words" if _is_words(read.core) else "a formula"


class Question(NamedTuple):
    """Whether an answer is the reference as mathematics."""

    reference: str
    answer: str
    boxed: bool  # the answer is the content of a box, else a text with the answer in it

    def told(self) -> bool | None:
        """Return the verdict that needs no mathematics; None where it needs some."""
        if not self.boxed and len(self.answer) >= 200:
            return None
        return _told_by_text(_read(self.reference), _read(self.answer))


def equal(reference: str, answer: str, *, boxed: bool, seconds: int) -> bool:
    """Return whether an answer is the reference as mathematics; False for any failure.

    `boxed` says that the answer is the content of a box, else it is a text with the answer in it. Parsing and
    comparing get `seconds` each, in any thread.
    """
    return equal_all([Question(reference, answer, boxed)], seconds=seconds)[0]


_FEW = 64  # different questions, which the main thread answers before children have started
_MINUTE = 60.0  # s for all questions of a call, and
_A_QUESTION = 0.2  # s for each different one, which takes 3 ms where nothing else runs


def equal_all(questions: Sequence[Question], *, seconds: int) -> list[bool]:
    """Return `equal` of each question; those that need mathematics are answered side by side.

    Equal ones are answered once. All of them have a minute and 0.2 s for each; what is not answered by then
    is False, with a warning.
    """
    told = {question: question.told() for question in dict.fromkeys(questions)}
    left = [question for question, verdict in told.items() if verdict is None]
    most = _MINUTE + _A_QUESTION * len(left)
    until = time.monotonic() + most
    early = _children.take_begun(left, seconds)
    rest = [question for question in left if question not in early]
    if len(rest) <= _FEW and threading.current_thread() is threading.main_thread():
        found = [None if time.monotonic() >= until else _verified(*x, seconds) for x in rest]
    else:
        found = _children.ask(rest, seconds, until)
    found += [_result(future, until) for future in early.values()]
    left = [*rest, *early]
    late = found.count(None)
    if late:
        warnings.warn(
            f"reward 'math': {late} of {len(left)} different answers were not compared within {most:.0f} s, "
            "and score 0",
            stacklevel=2,
        )
    verdicts = {**told, **dict(zip(left, found))}
    return [bool(verdicts[question]) for question in questions]


def begin_all(questions: Sequence[Question], *, seconds: int) -> None:
    """Have child processes answer questions that `equal_all` will be asked; it waits for those under way."""
    left = [question for question in questions if question.told() is None]
    if left:
        _children.begin(left, seconds)


def _result(verdict: "Future[bool | None]", until: float) -> bool | None:
    """Return a verdict that a child is on; None when time is up."""
    try:
        return verdict.result(max(until - time.monotonic(), 0))
    except TimeoutError:
        return None


def parses(reference: str, *, seconds: int) -> bool:
    """Return whether math-verify reads a reference as mathematics; True in a thread that it cannot stop."""
    if threading.current_thread() is not threading.main_thread():
        return True
    found = _parsed(rf"\boxed{{{_read(reference).core}}}", seconds)
    return any(not isinstance(x, str) for x in found)


def _verified(reference: str, answer: str, boxed: bool, seconds: int) -> bool:
    """Return what math-verify says, guarded. It needs the main thread."""
    gold = _read(reference)
    # in a box, so that nothing else of a text is taken for the answer
    golds = [rf"\boxed{{{x}}}" for x in dict.fromkeys((gold.core, gold.whole))]
    texts = [_latex(answer)]
    if boxed:
        given = _read(answer)
        texts = [rf"\boxed{{{x}}}" for x in dict.fromkeys((given.core, given.whole))]
    try:
        return any(_same(g, t, seconds) for g, t in zip(golds, [*texts, texts[-1]]))
    except Exception:  # sympy raises anything on strange input, and a strange answer is a wrong answer
        return False


def _same(gold: str, text: str, seconds: int) -> bool:
    import math_verify
    from math_verify.utils import timeout

    expected = _parsed(gold, seconds)
    given = _parsed(text, seconds)
    if not math_verify.verify(expected, given, timeout_seconds=seconds):
        return False
    return timeout(timeout_seconds=seconds)(_not_far)(expected, given)


@lru_cache(maxsize=4096)
def _parsed(text: str, seconds: int) -> list[Any]:
    import math_verify

    return math_verify.parse(text, parsing_timeout=seconds)


def _not_far(expected: list[Any], given: list[Any]) -> bool:
    """Return False for two numbers that are equal by six decimals, and not by six digits."""
    pairs = [(a, b) for a in expected for b in given if not isinstance(a, str) and not isinstance(b, str)]
    for a, b in pairs:
        if not (getattr(a, "is_number", False) and getattr(b, "is_number", False)):
            return True
        larger = max(abs(a.evalf(30)), abs(b.evalf(30)))
        if larger >= 1 or abs((a - b).evalf(30)) <= 2e-6 * larger:
            return True
    return not pairs


class _Child:
    """A process that compares, for one thread at a time; started when it is first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: Question, seconds: int, until: float) -> bool | None:
        """Return its verdict; False where it takes too long, and is ended, or fails; None when time is up."""
        if time.monotonic() >= until:
            return None
        line = json.dumps([*question, seconds]).encode() + b"\n"
        try:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
            return self._line(8 * seconds + 1) == b"1\n"
        except OSError:
            self._end()
            return False

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            weakref.finalize(self, _ended, self._process)
            self._line(120)  # its imports
        return self._process

    def _line(self, seconds: float) -> bytes:
        """Return its next line. TimeoutError after so many seconds."""
        assert self._process is not None and self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        return self._process.stdout.readline()

    def _end(self) -> None:
        if self._process is not None:
            _ended(self._process)
        self._process = None


def _ended(process: "subprocess.Popen[bytes]") -> None:
    """End a process."""
    with process:
        process.kill()


_BEGUN = 100_000  # questions that were begun and nobody has asked, at most: of rollouts that were lost


class _Children:
    """A few processes that compare; they stay, for their imports take a second."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._count = 0
        self._lock = threading.Lock()
        self._forget()
        os.register_at_fork(after_in_child=self._forget)  # a process that is forked has none of the threads

    def _forget(self) -> None:
        self._begun: dict[tuple[Question, int], Future[bool | None]] = {}
        self._waiting: queue.SimpleQueue[tuple[Question, int, Future[bool | None]]] = queue.SimpleQueue()
        self._threads = 0  # that answer what was begun

    def _start(self) -> int:
        """Make the processes, which start when they are asked, and return their number."""
        with self._lock:
            if not self._count:
                from rft_fn import cores  # not in a child

                self._count = cores.of_rank()
                for _ in range(self._count):
                    self._free.put(_Child())
            return self._count

    def _answer(self, question: Question, seconds: int, until: float) -> bool | None:
        """Return the verdict of a free child; None where none is free in time."""
        try:
            child = self._free.get(timeout=None if until == math.inf else max(until - time.monotonic(), 0))
        except queue.Empty:
            return None
        try:
            return child.ask(question, seconds, until)
        finally:
            self._free.put(child)

    def ask(self, questions: Sequence[Question], seconds: int, until: float) -> list[bool | None]:
        """Return their verdicts, None for those that the time was not enough for."""
        with ThreadPoolExecutor(max(1, min(self._start(), len(questions)))) as threads:
            try:
                return list(threads.map(lambda question: self._answer(question, seconds, until), questions))
            finally:
                threads.shutdown(cancel_futures=True)

    def begin(self, questions: Sequence[Question], seconds: int) -> None:
        """Answer questions in threads that nobody waits for, not even the end of the process."""
        count = self._start()
        with self._lock:
            for question in questions:
                if (question, seconds) not in self._begun:
                    verdict: Future[bool | None] = Future()
                    self._begun[question, seconds] = verdict
                    self._waiting.put((question, seconds, verdict))
            for question in list(self._begun)[: max(len(self._begun) - _BEGUN, 0)]:
                self._begun.pop(question).cancel()
            while self._threads < count:
                self._threads += 1
                threading.Thread(target=self._work, daemon=True, name="rft_fn math").start()

    def _work(self) -> None:
        while True:
            question, seconds, verdict = self._waiting.get()
            if verdict.set_running_or_notify_cancel():
                try:
                    verdict.set_result(self._answer(question, seconds, math.inf))
                except Exception as error:  # raised where the verdict is asked for
                    verdict.set_exception(error)

    def take_begun(
        self, questions: Sequence[Question], seconds: int
    ) -> "dict[Question, Future[bool | None]]":
        """Return the verdicts that a child has or is on; others are no longer begun."""
        with self._lock:
            found = {x: self._begun.pop((x, seconds)) for x in questions if (x, seconds) in self._begun}
        return {question: verdict for question, verdict in found.items() if not verdict.cancel()}


_children = _Children()


def _serve() -> None:
    """Answer lines of JSON on standard input, each with 1 or 0."""
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        import math_verify  # noqa: F401

        print("ready", flush=True)
        for line in sys.stdin:
            print(int(_verified(*json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
