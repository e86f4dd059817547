"""A release: what is built, the changelog's section, the workflow, and what stops it."""

import re
import shutil
import subprocess
import sys

import pages
import pytest
import release
import yaml
from each_case import each

ROOT = pages.ROOT
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
TEXT = "# Changelog\n\n## Unreleased (0.2.0)\n\n* New.\n\n## 0.1.0 (2026-01-02)\n\n* Old.\n"


@pytest.mark.slow
def test_what_is_built_has_every_file_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "DIST", tmp_path / "dist")
    sdist, wheel = release.build()
    release.check(sdist, wheel)
    assert release.PROJECT["version"] in sdist.name and release.PROJECT["version"] in wheel.name


def test_every_file_says_the_version():
    release.check_version(release.PROJECT["version"])
    with pytest.raises(SystemExit, match=r"expected the line 'version = .9\.9\.9"):
        release.check_version("9.9.9")


def test_the_changelog_has_the_section_of_this_version():
    assert release.section((ROOT / "CHANGELOG.md").read_text(), release.PROJECT["version"])


@each(("version", "want"), [("0.2.0", "* New.\n"), ("0.1.0", "* Old.\n")])
def test_a_section_of_the_changelog(version, want):
    assert release.section(TEXT, version) == want
    assert release.section(release.released(TEXT, "0.2.0", "2026-03-04"), version) == want


def test_a_section_that_is_not_there():
    for call in (release.section, lambda text, version: release.released(text, version, "2026-03-04")):
        with pytest.raises(SystemExit, match=r"CHANGELOG.md: expected one .*0\.3\.0"):
            call(TEXT, "0.3.0")


def test_a_tag_is_made_of_a_clean_tree_alone(tmp_path, monkeypatch):
    """Twice is refused, and so are changes that no commit has."""
    for name in [*release.VERSIONED, "CHANGELOG.md"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version = release.PROJECT["version"]
    (tmp_path / "CHANGELOG.md").write_text(TEXT.replace("0.1.0", "0.0.1").replace("0.2.0", version))
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "CHANGELOG", tmp_path / "CHANGELOG.md")

    release.tag(version)
    said = subprocess.run([*git, "tag", "-n9"], capture_output=True, text=True).stdout
    assert said.startswith(f"v{version}") and "* New." in said
    assert f"## {version} (20" in (tmp_path / "CHANGELOG.md").read_text()
    with pytest.raises(SystemExit, match=f"there is one|expected no tag v{version}"):
        release.tag(version)
    (tmp_path / "CHANGELOG.md").write_text("other")
    with pytest.raises(SystemExit, match="expected a clean work tree"):
        release.tag(version)


def test_a_python_that_is_not_here_is_named(capsys):
    assert not release.try_wheel(ROOT / "none.whl", "3.99", [])
    assert capsys.readouterr().out == "Python 3.99: not on this machine, left to the workflow\n"


def test_a_stranger_types_what_the_pages_show():
    texts = [(ROOT / page).read_text() for page in ("README.md", "docs/start.md", "docs/commands.md")]
    shown = [" ".join(words) for text in texts for words in pages.commands(text)]
    for command in release.COMMANDS:
        assert any(line.startswith(command.partition(" --")[0]) for line in shown), command


def test_the_workflow_runs_what_is_here():
    """Its jobs wait for one another, and each command of this repository is one that there is."""
    jobs = WORKFLOW["jobs"]
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "build": None, "try": "build", "publish": "try", "site": "publish", "image": "publish",
    }  # fmt: skip
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    parts = [line.split()[2] for line in lines if line.startswith("python tests/release.py")]
    assert parts == ["notes", "build", "try"]
    for part in parts:
        asked = [sys.executable, str(ROOT / "tests" / "release.py"), part, "--help"]
        assert subprocess.run(asked, capture_output=True).returncode == 0
    assert "make docs" in lines and any("docs/deploy/Dockerfile" in line for line in lines)
    supported = jobs["try"]["strategy"]["matrix"]["python"]
    assert "PYTHONS ?= " + " ".join(supported) in (ROOT / "Makefile").read_text()


def test_the_floor_that_is_tested_is_that_of_the_package():
    """`make test-floor` installs the oldest torch and transformers that a user may have."""
    allowed = dict(re.fullmatch(r"([\w-]+)(.*)", x).groups() for x in release.PROJECT["dependencies"])
    (line,) = re.findall(r"^FLOOR = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    installed = dict(x.split("==") for x in line.split())
    assert installed.keys() == {"torch", "transformers"}
    assert all(allowed[name] == f">={version.removesuffix('.0')}" for name, version in installed.items())
