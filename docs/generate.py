"""Writes the documents that are drawn from the code: ``python docs/generate.py``; ``--check`` fails on stale ones."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

from dispatcher import records, transitions
from feedline.cli import COMMANDS, SERVERS
from feedline.options import Parser, add_common
from manifests.wire import messages

FOLDER = Path(__file__).resolve().parent


def command_line() -> str:
    """docs/cli.md: the help text of each command."""
    parts = ["# Command line", "", "Written by `make docs` from the commands' own help.", ""]
    for name, text in COMMANDS.items():
        module = importlib.import_module(f"feedline.commands.{name}")
        parser = Parser(prog=f"feedline {name}", description=text[0].upper() + text[1:] + ".")
        module.add_arguments(parser)
        if name not in SERVERS:
            add_common(parser)
        parts += [f"## feedline {name}", "", *_help(parser)]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner, sub in action.choices.items():
                    parts += [f"### feedline {name} {inner}", "", *_help(sub)]
    return "\n".join(parts)


def _help(parser: argparse.ArgumentParser) -> list[str]:
    text = parser.format_help().rstrip()
    # Python 3.13 prints "-o, --output FILE" where older ones print "-o FILE, --output FILE"
    text = re.sub(r"(-\w) (\S+), (--[\w-]+) \2", r"\1, \3 \2", text)
    return ["```", text, "```", ""]


def protocol() -> str:
    """docs/protocol.md: its text by hand, with tables of messages and stored records drawn from the code."""
    text = (FOLDER / "protocol.md").read_text(encoding="utf-8")
    text = _between(text, "messages", _messages())
    return _between(text, "records", _records())


def _between(text: str, name: str, lines: list[str]) -> str:
    """``text`` with what lies between the two marks of that name replaced."""
    begin, end = f"<!-- {name}: drawn from the code by make docs -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"docs/protocol.md lacks {begin} or {end}")
    return "\n".join([before + begin, "", *lines, "", end + after])


def _classes(module: ModuleType) -> Iterator[tuple[ast.ClassDef, str]]:
    """Classes of a module in order, each with the heading of the section that it stands in."""
    source = inspect.getsource(module)
    headings = {
        number: line[5:].rstrip(" -") for number, line in enumerate(source.splitlines(), 1) if line[:5] == "# -- "
    }
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            above = [number for number in headings if number < node.lineno]
            yield node, headings[max(above)] if above else ""


def _fields(node: ast.ClassDef) -> str:
    found = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            kind = ast.unparse(item.annotation).replace("m.", "").replace("|", "\\|")
            default = f" = {ast.unparse(item.value).replace('m.', '')}" if item.value is not None else ""
            found.append(f"`{ast.unparse(item.target)}` {kind}{default}".replace("tuple()", "()"))
    return "<br>".join(found) or "none"


def _meaning(node: ast.ClassDef) -> str:
    text = " ".join((ast.get_docstring(node) or "").split()).replace("``", "`")
    return text.replace("|", "\\|")


def _messages() -> list[str]:
    requests = {kind.__name__ for kind in get_args(messages.Request)}
    replies = {kind.__name__ for kind in get_args(messages.Reply)}
    top, parts = [], []
    for node, heading in _classes(messages):
        kind = getattr(messages, node.name)
        tag = kind.__struct_config__.tag
        if node.name in ("Message", "Part_"):
            continue
        if tag is None:
            parts.append(f"| `{node.name}` | {_fields(node)} | {_meaning(node)} |")
            continue
        way = re.search(r"\((.+) -> (.+)\)", heading)
        sender, receiver = (way[1], way[2]) if way else ("", "")
        if node.name in replies and node.name not in requests:
            sender, receiver = receiver, sender
        direction = f"{sender} \u2192 {receiver}" if way else "inside others"
        top.append(f"| `{node.name}` (`{tag}`) | {direction} | {_fields(node)} | {_meaning(node)} |")
    return [
        "Fields without a default are always there. Every message may have `cause`, which ties log lines together.", "",
        "| message (tag) | direction | fields | meaning |", "|---|---|---|---|", *top, "",
        "Structures inside messages, without a tag:", "",
        "| structure | fields | meaning |", "|---|---|---|", *parts,
    ]  # fmt: skip


def _records() -> list[str]:
    nodes = {node.name: node for node, _ in _classes(records)}
    rows = []
    for line in (records.__doc__ or "").splitlines():
        found = re.fullmatch(r"    (\S+)\s{2,}(\w+)\s*(.*)", line) or re.fullmatch(r"    (\S+) (\w+)\s*(.*)", line)
        if found:
            node = nodes[found[2]]
            text = ". ".join(part for part in (found[3].capitalize(), _meaning(node)) if part)
            rows.append(f"| `{found[1]}` | `{found[2]}` | {_fields(node)} | {text} |")
    return ["| key | record | fields | meaning |", "|---|---|---|---|", *rows]


def states() -> str:
    """docs/states.md: a diagram and a table of each state machine."""
    parts = [
        "# States", "",
        "Written by `make docs` from `dispatcher/transitions.py`. Names of events are those of `dispatcher/events.py`; "
        "other events happen outside of the core. What a core does in `tests/properties/test_core_stateful.py` is held "
        "against these tables.", "",
    ]  # fmt: skip
    for machine in transitions.MACHINES:
        short = {state: state.replace(" ", "_") for state in machine.states}
        arrows: dict[tuple[str, str], list[str]] = {}
        for item in machine.transitions:
            events = arrows.setdefault((item.source, item.target), [])
            events += [item.event] if item.event not in events else []
        parts += [f"## {machine.name.capitalize()}", "", f"{machine.about} Kept in: {machine.where}.", ""]
        parts += ["```mermaid", "stateDiagram-v2", f"    [*] --> {short[machine.first]}"]
        parts += [
            f"    {short[source]} --> {short[target]}: {', '.join(events)}"
            for (source, target), events in arrows.items()
        ]
        parts += ["```", "", "| from | event | to | when |", "|---|---|---|---|"]
        parts += [f"| {t.source} | {t.event} | {t.target} | {t.when} |" for t in machine.transitions]
        parts.append("")
    return "\n".join(parts)


#: file in docs/ -> what makes its text
DOCUMENTS: dict[str, Callable[[], str]] = {"cli.md": command_line, "protocol.md": protocol, "states.md": states}


def main() -> int:
    """Write, or check, all documents."""
    # argparse wraps help to the terminal
    os.environ["COLUMNS"] = "100"
    stale = []
    for name, make in DOCUMENTS.items():
        path, text = FOLDER / name, make()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
            print(f"docs/{name} written")
    if stale and "--check" in sys.argv[1:]:
        print(f"stale: {', '.join(f'docs/{name}' for name in stale)}; run make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
