"""Files that other programs read: the container, roles of clusters, the citation, and the forms of issues.

The commands in them are those of docs/deploy.md and docs/scaling.md, and their parsers take them.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pages
import pytest
import yaml
from packaging.requirements import Requirement
from test_pages import check_rft
from torch.distributed import run as torchrun

import rft_fn as rft
from rft_fn.tools.launch import kubernetes, roles, slurm

pytestmark = pytest.mark.docs

ROOT = pages.ROOT
PAGE = pages.read("docs/deploy.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "docs" / "deploy" / "Dockerfile").read_text()
STEPS = [
    line.split(" ", 1) for line in DOCKERFILE.replace("\\\n", " ").splitlines() if re.match("[A-Z]+ ", line)
]
ARGS = {
    name: shlex.split(x)[0] if x else "" for name, x in (x.split("=", 1) for key, x in STEPS if key == "ARG")
}
SHELL = "\n".join(pages.indented(PAGE)).replace("\\\n", " ").split("\n")
DOCKER = [shlex.split(line) for line in SHELL if line.startswith("    docker ")]


def test_the_page_shows_the_files():
    shown = {block.text for block in pages.blocks(PAGE)}
    for path in sorted((ROOT / "docs" / "deploy").iterdir()):
        assert path.read_text() in shown, path.name
        assert f"({path.relative_to(ROOT / 'docs')})" in PAGE


# ---------- the container


def test_the_image_has_what_the_package_is_built_of(tmp_path):
    """What the Dockerfile copies makes the whole wheel."""
    for words in (shlex.split(x) for key, x in STEPS if key == "COPY"):
        for source in words[:-1]:
            to = tmp_path / (source if words[-1] == "./" else words[-1])
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile)(ROOT / source, to)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"rft_fn/__init__.py", "rft_kernels/__init__.py", "rft_scripts/grpo.py"} <= set(names)


def test_the_image_installs_what_the_package_wants():
    """The same torch in both layers, from an image whose Python is supported, and `rft` in front."""
    runs = [shlex.split(x) for key, x in STEPS if key == "RUN"]
    assert [words[:3] for words in runs] == [["pip", "install", "--no-cache-dir"]] * 2
    assert [words[3:] for words in runs] == [["${TORCH}"], [".${EXTRAS}", "${TORCH}"]]
    assert ARGS["TORCH"] in PROJECT["dependencies"] and ARGS["EXTRAS"] == ""
    (version,) = re.findall(r"^python:(\d+\.\d+)$", ARGS["BASE"])
    assert version in Requirement("python" + PROJECT["requires-python"]).specifier
    last = dict(STEPS)
    assert yaml.safe_load(last["ENTRYPOINT"]) == ["rft"] and "rft" in PROJECT["scripts"]
    check_rft(yaml.safe_load(last["CMD"]))


def test_the_commands_of_containers_are_understood():
    kinds = {"build": built, "run": started}
    assert [words[1] for words in DOCKER] == ["build"] * 3 + ["run"] * 4
    for _, kind, *words in DOCKER:
        kinds[kind](words)


def built(words):
    """`docker build`: the file, and the arguments that it reads."""
    assert words[:4] == ["-f", "docs/deploy/Dockerfile", "-t", "rft-fn"] and words[-1] == "."
    for flag, pair in zip(words[4:-1:2], words[5:-1:2], strict=True):
        name, _, value = pair.partition("=")
        assert flag == "--build-arg" and name in ARGS
        if name == "EXTRAS":
            assert set(value.strip("[]").split(",")) <= set(PROJECT["optional-dependencies"])
        if name == "TORCH":
            least = Requirement(ARGS["TORCH"]).specifier
            assert all(x.version in least for x in Requirement(value).specifier)


def started(words):
    """`docker run`: what the entry point gets."""
    options, arguments = words[: words.index("rft-fn")], words[words.index("rft-fn") + 1 :]
    assert {x for x in options if x[0] == "-"} <= {"--rm", "--gpus", "--ipc=host", "-v", "--entrypoint"}
    if "--entrypoint" in options:
        assert options[options.index("--entrypoint") + 1] == "torchrun"
        args = torchrun.parse_args(arguments)
        assert args.module and args.training_script == "rft_fn"
        arguments = args.training_script_args
    check_rft(arguments)


# ---------- a run on several machines


def test_the_files_for_clusters_are_those_of_the_roles():
    folder = ROOT / "docs" / "deploy"
    found = roles.read(folder / "run.toml")
    assert slurm.render(found, "run") == (folder / "run.sbatch").read_text()
    assert kubernetes.render(found, "run") == (folder / "run.yaml").read_text()


def test_the_commands_of_several_machines_are_understood():
    """The trainer's is that of docs/scaling.md for two nodes, beside its servers and where ranks meet."""
    jobs = yaml.safe_load((ROOT / "docs" / "deploy" / "run.yaml").read_text())["spec"]["replicatedJobs"]
    words = {x["name"]: x["template"]["spec"]["template"]["spec"]["containers"][0]["command"] for x in jobs}
    assert list(words) == ["rewards", "engines", "trainer"]
    check_rft(words["rewards"][1:])
    args = torchrun.parse_args(words["trainer"][1:])
    assert words["trainer"][0] == "torchrun" and (args.nnodes, args.nproc_per_node) == ("2", "8")
    assert args.module and args.training_script == "rft_fn" and "join_timeout=300" in args.rdzv_conf
    check_rft(args.training_script_args)
    (other,) = [x for x in pages.commands(pages.read("docs/scaling.md")) if "--nnodes" in x]
    other = torchrun.parse_args(other[1:])
    for name in ("nnodes", "nproc_per_node", "max_restarts", "rdzv_backend"):
        assert getattr(args, name) == getattr(other, name), name
    servers = ("--reward", "--engine-type", "--engine-servers", "--engine-transfer", "--out")
    options = set(args.training_script_args) - {"run", "grpo"}
    assert {x for x in options ^ set(other.training_script_args) if x.startswith("--")} <= set(servers)


# ---------- the citation, and the forms of issues


def test_the_citation_is_of_this_version():
    about = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(about) and about["cff-version"] == "1.2.0"
    assert about["version"] == rft.__version__ == PROJECT["version"]
    assert about["license"] == PROJECT["license"] and about["authors"] == [{"name": "The rft_fn authors"}]


@pytest.mark.parametrize("name", ["bug", "question"])
def test_a_form_of_an_issue_is_whole(name):
    """By the rules of GitHub's forms, which shows none of a form that breaks one."""
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text()
    form = yaml.safe_load(text)
    assert form["name"] and form["description"] and set(form) <= {"name", "description", "labels", "body"}
    asked = [part for part in form["body"] if part["type"] != "markdown"]
    assert asked and all(part["type"] in ("textarea", "input") for part in asked)
    assert all(part["attributes"]["label"] for part in asked)
    assert len({part["id"] for part in asked}) == len(asked)
    for page in re.findall(r"docs/[\w/.]+\.md", text):
        assert (ROOT / page).exists()
    for command in re.findall(r"`rft ([^`]*)`", text):
        check_rft(shlex.split(command))
