"""What the documents name is there: tests, hard cases, links, commands and options."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from feedline.cli import COMMANDS, LATER, main

ROOT = Path(__file__).resolve().parents[2]
GUARANTEES = ROOT / "docs" / "guarantees.md"
HARD_CASES = ROOT / "docs" / "hard-cases.md"
_TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CASES = re.compile(r"(?<![a-z])cases?[ _](\d+)(?: (?:and|to) (\d+))?", re.IGNORECASE)


def documents() -> list[Path]:
    """All Markdown files of the project."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return [ROOT / path for path in sorted(found) if not (path.parts[0].startswith(".") or path.parts[0] == "build")]


def named_tests(text: str) -> list[tuple[str, str]]:
    return [(found[1], found[2]) for found in _TEST.finditer(text)]


@cache
def defined_in(path: Path) -> dict[str, str]:
    """Test -> its name and docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    machines = {
        target.id: target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.startswith("Test")
    }
    return machines | {
        node.name: f"{node.name} {ast.get_docstring(node) or ''}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def cases_of(text: str) -> set[int]:
    """Numbers of hard cases that a test's name or docstring names."""
    found: set[int] = set()
    for match in _CASES.finditer(text):
        found.add(int(match[1]))
        if match[2]:
            found.add(int(match[2]))
    return found


def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as web pages of repositories make them."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [GUARANTEES, HARD_CASES], ids=lambda path: path.name)
def test_every_test_that_is_named_exists(document: Path) -> None:
    named = named_tests(document.read_text(encoding="utf-8"))
    assert named
    gone = [f"{file}::{name}" for file, name in named if not _exists(file, name)]
    assert not gone


def _exists(file: str, name: str) -> bool:
    return (ROOT / file).is_file() and name in defined_in(ROOT / file)


def test_every_guarantee_has_a_section_with_tests() -> None:
    text = GUARANTEES.read_text(encoding="utf-8")
    promised, _, rest = text.partition("\n## Beside delivery\n")
    sections = re.split(r"^### .*$", promised, flags=re.MULTILINE)[1:]
    rows = re.findall(r"^\| \[[^\]]+\]\(#", promised, re.MULTILINE)
    assert len(rows) == len(sections) > 0
    assert all(named_tests(section) for section in sections)
    beside, _, _ = rest.partition("\n## Not yet\n")
    assert all(named_tests(row) for row in re.findall(r"^\| [^-w].*$", beside, re.MULTILINE))


def described_cases() -> dict[int, list[tuple[str, str]]]:
    """Hard case -> tests named for it, in sections and in the table at the end."""
    text = HARD_CASES.read_text(encoding="utf-8")
    parts = re.split(r"^### Case (\d+)\. .*$", text.partition("\n## Also\n")[0], flags=re.MULTILINE)
    found = {int(number): named_tests(part) for number, part in zip(parts[1::2], parts[2::2], strict=True)}
    for row in re.finditer(r"^\| (\d+) \|(.*)$", text, re.MULTILINE):
        found[int(row[1])] = named_tests(row[2])
    return found


def test_every_hard_case_has_a_test_that_names_it() -> None:
    described = described_cases()
    assert set(range(1, 8)) <= set(described)
    wrong = [
        f"case {number}: {file}::{name}"
        for number, named in described.items()
        for file, name in named
        if number not in cases_of(defined_in(ROOT / file).get(name, ""))
    ]
    assert not wrong, "these tests do not say that they test the case"
    assert not [number for number, named in described.items() if not named]


def test_every_case_that_a_test_names_is_described() -> None:
    used: dict[int, str] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.name != Path(__file__).name:
            for name, text in defined_in(path).items():
                used.update(dict.fromkeys(cases_of(text), f"{path.name}::{name}"))
    unknown = {number: test for number, test in used.items() if number not in described_cases()}
    assert not unknown, "these cases are not described in docs/hard-cases.md"


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for link in _LINK.findall(_FENCED.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (document.parent / place).resolve() if place else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def command_lines(text: str) -> list[list[str]]:
    """Words of what follows ``feedline`` in code, up to the end of the command."""
    blocks = [block for block in _FENCED.findall(text) if not block.startswith("```python")]
    code = [*blocks, *re.findall(r"`(feedline [^`]+)`", text)]
    lines = re.findall(r"(?:^|[\s\"&;])feedline ((?:[\w./:=*\"'-]+ ?)*)", "\n".join(code), re.MULTILINE)
    return [words for line in lines if (words := line.partition(" -- ")[0].split())]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_options_exist(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in command_lines(document.read_text(encoding="utf-8")):
        if words[0].startswith("-") or words[0] in LATER or words[0] == "COMMAND":
            continue
        assert words[0] in COMMANDS, f"there is no command in 'feedline {' '.join(words)}'"
        options = [word for word in words if word.startswith("--")]
        action = [word for word in words[1:2] if words[0] == "manifest" and not word.startswith("-")]
        text = help_of(words[0], *action, capsys=capsys)
        assert not [option for option in options if option.partition("=")[0] not in text], f"in 'feedline {words}'"


_helps: dict[tuple[str, ...], str] = {}


def help_of(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``feedline COMMAND --help`` prints."""
    if command not in _helps:
        with pytest.raises(SystemExit) as ended:
            main([*command, "--help"])
        assert ended.value.code == 0, f"there is no 'feedline {' '.join(command)}'"
        _helps[command] = capsys.readouterr().out
    return _helps[command]


def test_the_readme_shows_commands() -> None:
    shown = {words[0] for words in command_lines((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert shown >= {"up", "dispatcher", "worker", "manifest", "audit", "status"}
