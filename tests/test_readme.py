"""README, CONTRIBUTING and docs say what is there: commands, options, targets and links exist."""

from __future__ import annotations

import pkgutil
import re
import shlex
from pathlib import Path

import click
import pytest

from edgelin import mixers
from edgelin.cli import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("*/*/*.md")])
DOCUMENTS = [path for path in DOCUMENTS if not path.relative_to(ROOT).parts[0].startswith(".")]
COMMANDS = main.list_commands(click.Context(main))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _shell_lines(text: str) -> list[str]:
    """Commands in the fenced shell blocks, continued lines joined."""
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if line.strip()]


@pytest.mark.parametrize("name", COMMANDS)
def test_readme_names_every_command(name: str) -> None:
    assert f"edgelin {name}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_commands_and_options_exist(path: Path) -> None:
    for line in _shell_lines(path.read_text()):
        words = shlex.split(line, comments=True)
        if len(words) < 2 or words[0] != "edgelin" or words[1].startswith("-"):
            continue
        command = main.get_command(click.Context(main), words[1])
        assert command is not None, line
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        given = {word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)}
        assert given - options - {"-h", "--help"} == set(), line


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in _shell_lines(path.read_text()):
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert {w for w in words[1:] if "=" not in w and not w.startswith("-")} <= targets, line


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if "://" not in link:
            assert (path.parent / link).exists(), f"{_name(path)} links to {link}"


def test_every_mixer_is_described_and_has_an_example() -> None:
    names = {module.name for module in pkgutil.iter_modules(mixers.__path__)}
    page = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == names
    used = "".join(path.read_text() for path in (ROOT / "examples").glob("*.toml"))
    assert set(re.findall(r'^type = "(\w+)"', used, re.MULTILINE)) == names
