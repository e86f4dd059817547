"""How a shell script is read, held to bash itself: stub programs on PATH record what bash passes to them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rft_fn.migrate import shell

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")
PROGRAMS = (
    "python",
    "python3",
    "torchrun",
    "accelerate",
    "deepspeed",
    "ray",
    "uv",
    "trl",
    "srun",
    "tee",
    "wandb",
)
# one write for each call: the programs of a pipe run at once
STUB = '#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" $\'\\n\' >> "$CALLS"\n'


def called(scripts, folder):
    """For each script the words of each call of a stub, by bash."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    for name in PROGRAMS:
        (folder / "bin" / name).write_text(STUB)
        (folder / "bin" / name).chmod(0o755)
    parts = []
    for k, text in enumerate(scripts):
        (folder / f"{k}.sh").write_bytes(text.encode())
        (folder / f"calls{k}").touch()
        parts.append(f"CALLS={folder}/calls{k} bash -f {folder}/{k}.sh 3>&1 > /dev/null 2>&1 < /dev/null")
    # descriptor 3 stays open in what a script left in the background: its end is waited for
    subprocess.run(
        [BASH, "-c", "\n".join(parts)], cwd=folder, check=False, capture_output=True, timeout=300,
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": "home"},
    )  # fmt: skip
    found = []
    for k in range(len(scripts)):
        records = (folder / f"calls{k}").read_bytes().decode().split("\n\0")[:-1]
        found.append([record.split("\0")[:-1] for record in records])
    return found


def read(text):
    """The words of each call of a stub, as this library reads the script."""
    found = [command.words for command in shell.commands(text)]
    return [words for words in found if words[0] in PROGRAMS and words[0] != "tee"]


# ------------------------------------------------------------------------------ made scripts

PLAIN = st.sampled_from(
    ["x", "1e-6", "a.b=c", "--lr", "a/b.c", "['p','q']", "k=v", "7", "~", "a,b", "é", "x:y@z", "+a.b=1"]
)
INNER = st.sampled_from(
    ["x y", "a  b", " p", "#n", "it's", "a;b", "a|b", "a&b", "*", "x\ty", "{}", "(x)", "a\nb"]
)
NUMBERS = ("N", "M")
TEXTS = ("A", "B")
NUMBER = st.one_of(
    st.integers(1, 40).map(str), st.sampled_from(NUMBERS), st.sampled_from([f"${{{x}}}" for x in NUMBERS])
)
ARITHMETIC = st.builds(
    lambda a, op, b: f"$(({a}{op}{b}))", NUMBER, st.sampled_from([" * ", "+", " - ", "/", "%"]), NUMBER
)
EXPANDED = st.one_of(
    st.sampled_from([f"${x}" for x in (*TEXTS, *NUMBERS)] + [f"${{{x}}}" for x in (*TEXTS, *NUMBERS)]),
    st.sampled_from(
        [
            "${U:-d}",
            "${U-'d e'}",
            "${A:-d}",
            "${A:+on}",
            "${U:+on}",
            "${E:-f}",
            "${E-f}",
            "${A%c}",
            "${A##*/}",
        ]
    ),
    st.sampled_from(
        ["${A/a/z}", "${A//a/z}", "${B^^}", "${A:1}", "${A:0:1}", "${L[0]}", "${L[1]}", "${A%%.*}"]
    ),
    ARITHMETIC,
)
QUOTED = st.one_of(
    INNER.filter(lambda x: "'" not in x).map(lambda x: f"'{x}'"),
    st.lists(st.one_of(INNER, EXPANDED, PLAIN, st.sampled_from([r"\"", r"\$A"])), max_size=3).map(
        lambda x: f'"{"".join(x)}"'
    ),
    st.just('"${L[@]}"'), st.just('"${L[*]}"'), st.just('"$@"'), st.just('"p${L[@]}q"'),
    st.sampled_from([r"$'a\nb'", r"$'a\tb'", r"a\ b", r"a\"b", r"\$A", "''", '""', r"a\\b"]),
)  # fmt: skip
WORD = st.lists(st.one_of(PLAIN, QUOTED, EXPANDED), min_size=1, max_size=3).map("".join)
GAP = st.sampled_from([" ", "  ", " \\\n  ", "\t", " \\\n"])


@st.composite
def commands(draw):
    """A call of a program, perhaps with variables before it and something behind."""
    words = draw(st.lists(WORD, max_size=5))
    text = draw(st.sampled_from(["", "X=1 ", "CUDA=0 Y='a b' "])) + draw(
        st.sampled_from(["python3 -m a.b", "torchrun f.py"])
    )
    for word in words:
        text += draw(GAP) + word
    behind = [
        "",
        " $@",
        " 2>&1 | tee log",
        " > out.txt",
        " 2> err",
        " # end",
        " || true",
        " && :",
        " \\",
        "; :",
        " &",
        " >> a 2>&1",
    ]
    return text + draw(st.sampled_from(behind))


@st.composite
def statements(draw):
    """An assignment, a condition, a document, or a command within a text."""
    name, value, call = (
        draw(st.sampled_from(TEXTS)),
        draw(WORD),
        draw(commands().filter(lambda x: not x.endswith("\\"))),
    )
    kind = draw(st.integers(0, 13))
    return [
        f"{name}={value}", f"export {name}={value}", f'{name}="{draw(INNER)}"', f"{name}+=more",
        f"L=({value} {draw(WORD)}\n  # note\n {draw(PLAIN)})", f"L+=({draw(PLAIN)} {draw(QUOTED)})",
        f"if [ ${{N}} -gt {draw(st.integers(0, 20))} ]; then {name}=yes; else {name}=no; fi",
        f'if [[ "$A" == "{draw(PLAIN)}" ]]; then {name}=1\nelif [ -z "$U" ]; then {name}=2; fi',
        f'[ -n "$A" ] && {name}=set', f'[ -z "$A" ] || {name}=set',
        f"read -r -d '' {name} <<EOF\n$B x\nEOF",
        f"N={draw(ARITHMETIC.filter(lambda x: not set(x) & set('-/%')))}", call,
        'eval "python3 -m e.f $N --a 1"',
    ][kind]  # fmt: skip


START = "N=4\nM=3\nA=a/b.c\nB='x y'\nE=\nL=(l0 'l 1')\n"


@st.composite
def scripts(draw):
    return START + "\n".join([*draw(st.lists(statements(), max_size=5)), draw(commands())])


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(texts=st.lists(scripts(), min_size=5, max_size=30))
def test_what_is_read_is_what_bash_passes(texts, tmp_path_factory):
    for text, wanted in zip(texts, called(texts, tmp_path_factory.getbasetemp() / "bash"), strict=True):
        if any(command.unknown for command in shell.commands(text)):
            continue  # a variable that nobody set keeps its name
        wanted = [words for words in wanted if words[0] != "tee"]
        found = [[x.replace("${HOME}", "home") for x in words] for words in read(text)]
        if re.search(" &$", text, re.M):  # what runs in the background has no order
            found, wanted = sorted(found), sorted(wanted)
        assert found == wanted, text


FUNCTIONS = r"""
# it's "one
train() {
  local algo=$1 n=${2:-8}
  shift 2
  python -m x algo=$algo n=$n "$@" name="s_$1" left=$# 'a } b' ${3:-none}
}
function twice { train "$1" 4 "${@:2}"; python done "$@"; }
twice () { python again ${1}0 "$*"; train $2 6 k; }
train grpo 16 lr=1e-6 "two words"
function later
{
  if [[ $1 == a ]]; then python "is $1"; else python other; fi
}
twice rloo b c
later a; later b && python end
"""


ARRAYS = r"""
declare -A P=( [lr]=3e-6 [n]="4 5" )
P[m]=7
k=lr; L=(a b c); i=1
L[3]=d
python lr=${P[lr]} n="${P["n"]}" m=${P[m]} k=${P[$k]} "${L[i]}" ${L[0]} ${L[3]} "${L[@]}" \
  `# a comment` $((2 ** 10)) $(( 3**2*2 ))
"""


def test_an_item_of_an_array_is_that_of_its_key(tmp_path):
    (wanted,) = called([ARRAYS], tmp_path / "bash")
    assert read(ARRAYS) == wanted and wanted[0][1] == "lr=3e-6"
    assert read("declare -A P=( [a]=1 )\npython ${P[b]} $((2 ** 2 ** 99))\n")[0][1] == "${P[b]}"


def test_a_function_is_read_where_it_is_called(tmp_path):
    """With the arguments of each call, as bash passes them; one that nothing calls is read at the end."""
    (wanted,) = called([FUNCTIONS], tmp_path / "bash")
    assert read(FUNCTIONS) == wanted and len(wanted) == 6
    body = FUNCTIONS.partition("train grpo")[0]
    assert [words[1] for words in read(body)] == ["-m", "again", "-m"]
    assert read("f() {\n  python a=$1 # it's\n}\n") == [["python", "a=$1"]]  # a body without its end
    many = "".join(f"f{k}() {{\n  f{k + 1}; f{k + 1}\n}}\n" for k in range(40)) + "f0\n"
    assert shell.commands(many + "f40() {\n  f0\n}\n") is not None


# ------------------------------------------------------------------------------ the corpus

FOLDER = Path(__file__).parent / "corpus"
SCRIPTS = {
    f"{path.stem}/{name.strip()}": text
    for path in sorted(FOLDER.glob("*.txt"))
    for name, text in re.findall(r"^==== (.*)\n((?:(?!==== ).*\n?)*)", path.read_text(), re.M)
    if name.strip().endswith(".sh")
}


def test_the_corpus_is_read_as_bash_reads_it(tmp_path):
    """Words with a variable that the script does not set have no value here, and an empty one there."""
    compared = 0
    for (name, text), wanted in zip(
        SCRIPTS.items(), called(SCRIPTS.values(), tmp_path / "bash"), strict=True
    ):
        ours = [words for words in read(text) if not words[0].startswith("$")]
        wanted = [words for words in wanted if words[0] != "tee"]
        first = wanted[: len(ours)]  # of a loop only the first is read
        if not first:  # it ends without arguments, with which it is read here
            continue
        assert ours, name
        for mine, theirs in zip(ours, first, strict=False):
            if not any("$" in word or "`" in word for word in (*mine, *theirs)):
                theirs = [x.replace(str(tmp_path / "bash"), ".") for x in theirs]  # of $(pwd)
                assert mine == theirs, name
                compared += len(mine)
    assert compared > 400
