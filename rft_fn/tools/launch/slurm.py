"""A file of roles as a batch job of Slurm: one text for sbatch, which a person can read and change.

Each role is a group of a heterogeneous job, each replica a step of it. The script starts them in order, waits
until they are ready, ends all with the first that fails, and queues the job again after a SIGTERM of Slurm.
"""

import math
import re
import shlex
from collections.abc import Sequence

from rft_fn.tools.launch import roles
from rft_fn.tools.launch.roles import Place, Program, Role, Roles

__all__ = ["render"]

_WIDTH = 110
_OURS = (  # options that follow from the roles
    "array", "cpus-per-task", "gpus-per-node", "gpus", "nodes", "ntasks", "ntasks-per-node", "open-mode",
    "output", "requeue", "signal",
)  # fmt: skip
_BEGIN, _END, _LAST = "\ue000", "\ue001", "\ue002"  # around what bash is to expand
_MARK = re.compile(f"{_BEGIN}([0-9a-f]*){_END}")
_NODE = "%NODE%"  # known only where a task runs

_SCRIPT = r"""
set -uo pipefail
job=$SLURM_JOB_ID logs=@LOGS@ grace=@GRACE@ main=(@MAIN@)
# each step says its own; srun would take these for all of them
unset "${!SLURM_MEM_PER_@}" SLURM_GPUS_PER_NODE SLURM_CPUS_PER_TASK SLURM_NTASKS_PER_NODE SLURM_TRES_PER_TASK
declare -A pid codes begun group server  # of each program, by its name
order=() asked=
mkdir -p "$logs" || exit

say() { echo "launch | $*"; }

clock() { cut -d . -f 1 /proc/uptime; }  # seconds, which no change of the date moves

join() { local IFS=,; echo "$*"; }

run() {  # NAME GROUP NODES COUNT [OPTION...] COMMAND...: starts a program as a step of the job
    local name=$1
    say "$name starts on $3"
    order+=("$name") begun[$name]=$(clock) group[$name]=$2
    srun @HET@--job-name="$name" --nodelist="$3" --nodes="$4" --ntasks="$4" --ntasks-per-node=1 \
        --exact --mem=0 --kill-on-bad-exit=1 --open-mode=append --output="$logs/$name.log" "${@:5}" &
    pid[$name]=$!
}

over() {  # NAME: whether it has ended; codes[NAME] is how
    [ -z "${codes[$1]-}" ] || return 0
    ! kill -0 "${pid[$1]-$$}" 2> /dev/null || return 1
    wait "${pid[$1]}"
    codes[$1]=$?
}

finished() {  # whether each program of the main role has ended with 0
    local name
    for name in "${main[@]}"; do
        over "$name" && [ "${codes[$name]}" = 0 ] || return 1
    done
}

running() {  # GROUP...: whether programs of these groups run, which `left` names
    local name
    left=()
    for name in "${order[@]}"; do
        [[ " $* " != *" ${group[$name]} "* ]] || over "$name" || left+=("$name")
    done
    [ ${#left[@]} != 0 ]
}

stop() {  # ends all, first what needs others: SIGTERM, and SIGKILL after the grace
    local groups number name end
    for groups in @STOP@; do
        # shellcheck disable=SC2086
        running $groups || continue
        for number in $groups; do scancel --signal=TERM "@TARGET@"; done
        end=$(($(clock) + grace))
        # shellcheck disable=SC2086
        while running $groups && [ "$(clock)" -lt $end ]; do sleep 0.5; done
        for name in ${left[@]+"${left[@]}"}; do
            say "$name is killed"
            kill -TERM "${pid[$name]}"  # of srun, which sends SIGKILL to its program
            wait "${pid[$name]}"
        done
    done
}

fail() {  # CODE NAME WHAT: ends the job as the program did
    {
        echo "error: $2 $3, after $(($(clock) - ${begun[$2]})) s; its last lines, of $logs/$2.log:"
        tail -n 20 "$logs/$2.log" | sed 's/^/    /'
    } >&2
    stop
    exit "$1"
}

again() {  # ends all, and has Slurm start the job once more, which resumes the run
    say "SIGTERM: all end, and the job is queued again"
    stop
    if finished; then exit 0; fi
    scontrol requeue "$job"
    exit 143
}

look() {  # once, after half a second
    local name code
    sleep 0.5
    [ -z "$asked" ] || again
    if finished; then
        stop
        exit 0
    fi
    for name in "${order[@]}"; do
        over "$name" || continue
        code=${codes[$name]}
        if [ "$code" = 143 ]; then again; fi  # a SIGTERM of Slurm to its steps
        [ "$code" = 0 ] || fail "$code" "$name" "ended with code $code"
        [ -z "${server[$name]-}" ] || fail 1 "$name" "ended with code 0 before the main role"
    done
}

await() {  # NAME SECONDS URL: returns once it answers
    server[$1]=$3
    until curl --silent --fail --output /dev/null --noproxy '*' --max-time 5 "$3"; do
        look
        [ $(($(clock) - ${begun[$1]})) -lt "$2" ] || fail 1 "$1" "gave no 200 at $3 within $2 s"
    done
    say "$1 is ready after $(($(clock) - ${begun[$1]})) s"
}

trap 'asked=yes' TERM

# ---------- who is where
"""


def render(found: Roles, name: str) -> str:
    """Return the batch job `name` of a file of roles. ValueError for what a job cannot have."""
    _check(found)
    level = roles.levels(found.roles)
    order = sorted(found.roles, key=lambda role: level[role])
    levels = [[role for role in order if level[role] == i] for i in range(max(level.values()) + 1)]
    several = len(order) > 1
    values = {
        "LOGS": shlex.quote(f"logs/{name}"),
        "GRACE": str(math.ceil(found.grace)),
        "MAIN": " ".join(_names(found, found.main)),
        "HET": '--het-group="$2" ' if several else "",
        "TARGET": "$job+$number" if several else "$job",
        "STOP": " ".join(f'"{" ".join(str(order.index(x)) for x in some)}"' for some in levels[::-1]),
    }
    script = re.sub(r"@([A-Z]+)@", lambda x: values[x[1]], _SCRIPT)
    starts = []
    for some in levels:
        for role in some:
            starts += _start(found, role, order.index(role))
        for role in some:
            starts += _wait(found, role)
    return "\n".join(
        [
            *_options(found, name, order, len(levels)),
            script.rstrip(),
            *_places(found, order),
            "",
            "# ---------- the roles, each after what it needs",
            *starts,
            "",
            "while :; do look; done",
            "",
        ]
    )


def _check(found: Roles) -> None:
    """Raise ValueError for a file that has no job."""
    for place, some in [
        ("slurm", found.slurm),
        *((f"roles.{x}.slurm", y.slurm) for x, y in found.roles.items()),
    ]:
        for option in some:
            if option in _OURS:
                raise ValueError(f"{place}: expected no {option}, which the roles decide, got one")
    known: dict[str, str] = {}
    for name, role in found.roles.items():
        other = known.setdefault(_word(name), name)
        if other != name or not name[0].isalpha():
            like = f", which bash takes for {other}" if other != name else ""
            raise ValueError(f"roles: expected names that begin with a letter and differ, got {name!r}{like}")
        if role.gpus > found.gpus_per_node:
            raise ValueError(
                f"roles.{name}.gpus: expected at most gpus_per_node = {found.gpus_per_node}, got {role.gpus}"
            )
        if role.ready and not role.ready.startswith("/"):
            raise ValueError(
                f"roles.{name}.ready: expected a path as /health, whose host is a node's, got {role.ready}"
            )
        roles.check_meeting(name, role)


def _word(name: str) -> str:
    """Return the name of a role within bash's names."""
    return name.replace("-", "_")


def _names(found: Roles, role: str) -> list[str]:
    count = found.roles[role].replicas
    return [role] if count == 1 else [f"{role}-{i}" for i in range(count)]


def _shared(found: Roles, role: Role) -> int:
    """Return how many replicas of a role share a machine."""
    if role.nodes > 1:
        return 1
    return min(role.replicas, found.gpus_per_node // max(role.gpus, 1))


def _nodes(found: Roles, role: Role) -> int:
    return role.nodes * math.ceil(role.replicas / _shared(found, role))


def _options(found: Roles, name: str, order: Sequence[str], levels: int) -> list[str]:
    """Return the head of the job: what Slurm is asked for."""
    notice = math.ceil(found.grace) * levels + 30
    lines = [
        "#!/bin/bash",
        f"# The roles of {name}.toml, written by: rft launch {name}.toml --to slurm --out {name}.sbatch",
        "# In a folder that all nodes see, with the environment that has rft_fn active:",
        "#",
        f"#     sbatch {name}.sbatch",
        "",
        *([] if "job-name" in found.slurm else [f"#SBATCH --job-name={name}"]),
        f"#SBATCH --output={name}-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        f"#SBATCH --signal=B:TERM@{notice}",
    ]
    for i, x in enumerate(order):
        role = found.roles[x]
        shared = _shared(found, role)
        lines += ["#SBATCH hetjob"] if i else []
        lines += [
            f"# {x}",
            f"#SBATCH --nodes={_nodes(found, role)}",
            f"#SBATCH --ntasks-per-node={shared}",
            f"#SBATCH --cpus-per-task={roles.cpus(role)}",
        ]
        lines += [f"#SBATCH --gpus-per-node={role.gpus * shared}"] if role.gpus else []
        options = {**found.slurm, **role.slurm}
        lines += [f"#SBATCH --{key}={y}" if y else f"#SBATCH --{key}" for key, y in options.items()]
    return lines


def _places(found: Roles, order: Sequence[str]) -> list[str]:
    """Return the lines that find nodes, ports and addresses."""
    lines = []
    for i, x in enumerate(order):
        group = f"_HET_GROUP_{i}" if len(order) > 1 else ""
        lines.append(f'found=$(scontrol show hostnames "$SLURM_JOB_NODELIST{group}") || exit')
        lines.append(f'mapfile -t {_word(x)}_nodes <<< "$found"')
    needed = roles.needed_ports(found)
    begin = 0
    if needed:  # jobs that share a node differ
        lines.append(f"port=$((20000 + job * {sum(needed.values())} % 9000))")
    for x in order:
        if x not in needed:
            continue
        word, count = _word(x), needed[x]
        lines.append(f"{word}_port=$((port + {begin})) {word}_urls=()")
        host, port = _head(found, x), _port(found, x)
        address = f'{word}_urls+=("http://{host}:{port}")'
        lines.append(address if count == 1 else f"for i in {{0..{count - 1}}}; do {address}; done")
        begin += count
    everywhere = " ".join(f'"${{{_word(x)}_nodes[@]}}"' for x in order)
    lines.append(f"NO_PROXY=${{NO_PROXY:+$NO_PROXY,}}127.0.0.1,$(join {everywhere})")
    lines.append("export PYTHONUNBUFFERED=1 NO_PROXY no_proxy=$NO_PROXY")
    return lines


def _head(found: Roles, name: str) -> str:
    """Return the first machine of replica i as bash finds it."""
    role = found.roles[name]
    if role.replicas == 1:
        return f"${{{_word(name)}_nodes[0]}}"
    shared = _shared(found, role)
    place = f"i * {role.nodes}" if role.nodes > 1 else f"i / {shared}" if shared > 1 else "i"
    return f"${{{_word(name)}_nodes[{place}]}}"


def _port(found: Roles, name: str) -> str:
    word = f"{_word(name)}_port"
    return f"${word}" if found.roles[name].replicas == 1 else f"$(({word} + i))"


def _program(found: Roles, name: str) -> Program:
    """Return the program of a role, with marks for what bash is to expand."""
    role = found.roles[name]
    urls = {}
    for other, x in found.roles.items():
        array = f"{_word(other)}_urls"
        one, several = f"${{{array}[0]}}", f"${{{array}[@]}}"
        urls[other] = _mark(one) if x.replicas == 1 else f"{_mark(several)} {_LAST}"
    place = Place(
        port=_mark(_port(found, name)),
        replica=_mark("$i") if role.replicas > 1 else "0",
        node=_NODE if role.nodes > 1 else "0",
        head=_mark(_head(found, name)),
        urls=urls,
    )
    return roles.fill(found.roles, name, place)


def _start(found: Roles, name: str, group: int) -> list[str]:
    """Return the lines that start the replicas of a role."""
    role = found.roles[name]
    several = role.replicas > 1
    program = _program(found, name)
    env = [f"{key}={x}" for key, x in program.env.items()]
    words = _quoted([*(["env", *env] if env else []), *program.words])
    node = any(_NODE in x for x in words)
    if node:
        words = ["bash", "-c", f"""'exec "${{@//{_NODE}/$SLURM_PROCID}}"'""", "_", *words]
    if role.nodes == 1:
        nodes = f'"{_head(found, name)}"'
    else:
        begin = f"i * {role.nodes}" if several else "0"
        nodes = f'"$(join "${{{_word(name)}_nodes[@]:{begin}:{role.nodes}}}")"'
    options = [f"--cpus-per-task={roles.cpus(role)}"]
    options += [f"--gpus-per-node={role.gpus}"] if role.gpus else []
    head = ["run", f'"{name}-$i"' if several else name, str(group), nodes, str(role.nodes), *options]
    indent = "    " if several else ""
    lines = [f"{indent}# shellcheck disable=SC2016"] if node else []
    lines += [*_wrapped(head, indent, last=False), *_wrapped(words, f"{indent}    ")]
    return [f"for i in {{0..{role.replicas - 1}}}; do", *lines, "done"] if several else lines


def _wait(found: Roles, name: str) -> list[str]:
    """Return the lines that wait until the replicas of a role are ready."""
    role = found.roles[name]
    if not role.ready or name == found.main:
        return []
    seconds = math.ceil(role.ready_within)
    which = "i" if role.replicas > 1 else "0"
    title = f'"{name}-$i"' if role.replicas > 1 else name
    url = _mark(f"${{{_word(name)}_urls[{which}]}}") + _program(found, name).ready
    line = " ".join(["await", title, str(seconds), *_quoted([url])])
    return [f"for i in {{0..{role.replicas - 1}}}; do {line}; done" if role.replicas > 1 else line]


def _mark(expression: str) -> str:
    """Return a text that stands for what bash is to expand, and that a split into words leaves whole."""
    return f"{_BEGIN}{expression.encode().hex()}{_END}"


def _quoted(words: Sequence[str]) -> list[str]:
    """Return words for bash, in which only what was marked is expanded."""
    whole: list[str] = []
    for word in words:
        if word.startswith(_LAST):  # the second of the two words that a list of addresses was
            whole[-1] += word[1:]
        else:
            whole.append(word)
    made = []
    for word in whole:
        inside = f" {_LAST}" in word  # all addresses in one word
        parts = _MARK.split(word.replace(f" {_LAST}", ""))
        if len(parts) == 1:
            made.append(shlex.quote(word))
            continue
        for k, x in enumerate(parts):
            if k % 2:
                expression = bytes.fromhex(x).decode()
                parts[k] = expression.replace("[@]", "[*]") if inside else expression
            else:
                parts[k] = re.sub(r'([\\$"`])', r"\\\1", x)
        made.append(f'"{"".join(parts)}"')
    return made


def _wrapped(words: Sequence[str], indent: str, *, last: bool = True) -> list[str]:
    """Return words as lines of one command of bash."""
    whole: list[str] = []
    for word in words:  # an option stays with its value
        if whole and re.fullmatch("--?[a-z-]+", whole[-1]) and not word.startswith("-"):
            whole[-1] += f" {word}"
        else:
            whole.append(word)
    lines = [indent]
    for word in whole:
        if lines[-1].strip() and len(lines[-1]) + len(word) + 3 > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"{indent}    ")
        lines[-1] += (" " if lines[-1].strip() else "") + word
    return lines if last else [*lines[:-1], f"{lines[-1]} \\"]
