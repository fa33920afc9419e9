"""Writes the documents that are drawn from the code: ``python docs/generate.py``; ``--check`` fails on stale ones."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from feedline.cli import COMMANDS, SERVERS
from feedline.options import Parser, add_common

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


#: file in docs/ -> what makes its text
DOCUMENTS: dict[str, Callable[[], str]] = {"cli.md": command_line}


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
