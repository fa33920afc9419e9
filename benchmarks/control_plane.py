"""Measures the control plane: grants per second, time of an ask, take-over, and what a manifest of a million shards costs.

    python benchmarks/control_plane.py [core service takeover manifest] [--shards 1000000] [--ranks 256] [--workers 64]
                                       [--seconds 8] [--rounds 3] [--profile]

core      the pure core and the store in memory, one process, no network: what decisions cost, per second of CPU
service   a dispatcher process on a real etcd; simulated workers and ranks in other processes, over Flight
takeover  the leader is killed with SIGKILL, on the same host and as if on another: from the end of its lease to a grant
manifest  loading a manifest, as a client and as the dispatcher does

Both orders are measured. Prints medians and writes build/control_plane.json. ``--profile`` adds where the core's time goes.
"""

from __future__ import annotations

import os

# the etcd3 package needs it, see dispatcher/etcd_store.py
os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")

import argparse
import contextlib
import cProfile
import json
import pstats
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from dispatcher import events
from dispatcher.effects import Put, Reply
from dispatcher.etcd_store import EtcdStore
from dispatcher.files import Files
from dispatcher.groups import transactions
from dispatcher.memory_store import MemoryStore
from dispatcher.state import State
from dispatcher.store import Term
from feedline.client import Client
from feedline.etcd import Etcd
from feedline.local import LocalCluster
from manifests import Field, Manifest
from manifests.errors import FeedlineError
from manifests.granted import decode_pieces
from manifests.identity import digest
from manifests.plan import Plan
from manifests.wire import codec
from manifests.wire import messages as m
from manifests.wire.connection import parse_address, parse_addresses
from manifests.wire.flight import Connection, PeerSilent, PeerUnreachable

ROOT = Path(__file__).resolve().parent.parent
#: shards granted per ask
GRANTS = 8
ROWS = 100
ORDERS = ("deterministic", "dynamic")
Figures = dict[str, float]


@dataclass(frozen=True)
class Size:
    """How large the job is."""

    shards: int
    ranks: int
    workers: int


def big_manifest(shards: int) -> Manifest:
    """Shards that are nowhere: the control plane never looks at them. Content ids do not compress, as real ones."""
    draw = np.random.default_rng(1)
    ids = draw.bytes(32 * shards)
    table = pa.table(
        {
            "uri": pa.array([f"s3://bucket/train/shard-{n:07d}.tar" for n in range(shards)], pa.large_utf8()),
            "format": pa.array(["tar"] * shards).dictionary_encode(),
            "rows": np.full(shards, ROWS, np.int64),
            "bytes": np.full(shards, 64 << 20, np.int64),
            "content_id": pa.array(
                ["blake3:" + ids[at : at + 32].hex() for at in range(0, len(ids), 32)], pa.large_utf8()
            ),
        }
    )
    return Manifest("big", "1", (Field("cls", "scalar", "int64"),), {}, table)


def settings_of(manifest: Manifest, ranks: int, order: Any, spec: str) -> m.JobSettings:
    return m.JobSettings(
        sources=(m.Source(digest=manifest.digest, name=manifest.name, version=manifest.version),), spec=spec, pipeline="",
        batch_size=64, world_size=ranks, order=order, seed=1,
    )  # fmt: skip


def opening(job: str, rank: int, settings: m.JobSettings) -> m.OpenJob:
    holder = m.Holder(uid=f"u{rank}", host="elsewhere", pid=1 + rank)
    return m.OpenJob(job=job, rank=rank, holder=holder, nonce="n", settings=settings)


def registering(number: int) -> m.RegisterWorker:
    return m.RegisterWorker(
        id=f"w{number}", incarnation="i", address=f"10.0.{number // 256}.{number % 256}:7000", host=f"h{number}", pid=1,
        memory_bytes=64 << 30, capabilities=("format:tar",), fingerprint="f",
    )  # fmt: skip


class Asker:
    """What one rank asks for, one ask after the other: the next shards of its part, or of the pieces that it got."""

    def __init__(self, job: str, rank: int, opened: m.JobOpened, shards: int, plan: Plan) -> None:
        self._fields = {"job": job, "rank": rank, "generation": opened.generation, "holder": f"u{rank}", "epoch": 0}
        self._dynamic = opened.settings.order == "dynamic"
        self._plan = plan
        part = shards // opened.settings.world_size
        self._next, self._stop = rank * part, (rank + 1) * part
        self._first = self._next
        self._old: tuple[m.ShardAsk, ...] = ()
        self._wanted: list[int] = []
        self._have = self._place = self._asks = 0
        self._lanes = (opened.settings.lanes or 1) // opened.settings.world_size
        self._lane_rows = shards * ROWS // (opened.settings.lanes or 1)

    def ask(self) -> m.AskGrants:
        if self._dynamic:
            shards = tuple(m.ShardAsk(source=0, shard=s) for s in self._wanted)
            want = {"have": self._have, "want": self._have + GRANTS * ROWS, "place": self._place}
        else:
            if self._next + GRANTS > self._stop:
                self._next = self._first
            shards = tuple(m.ShardAsk(source=0, shard=self._next + n) for n in range(GRANTS))
            self._next += GRANTS
            want = {}
        ask = m.AskGrants(shards=shards, done=self._old, **want, **self._fields)  # type: ignore[arg-type]
        self._old = shards
        return ask

    def report(self) -> m.Report | None:
        """Every 16 asks: what was asked for before was handed out and acknowledged."""
        self._asks += 1
        if self._asks % 16:
            return None
        if self._dynamic:
            rows, handed = self._place, (self._place,)
        else:
            rows = (self._asks - 1) * GRANTS * ROWS
            handed = (min(rows // self._lanes, self._lane_rows),) * self._lanes
        steps = rows // 64
        progress = m.EpochProgress(epoch=0, step=steps, acked_step=steps, handed=handed, acked=handed)
        return m.Report(epochs=(progress,), **{k: v for k, v in self._fields.items() if k != "epoch"})  # type: ignore[arg-type]

    def took(self, grants: m.Grants) -> int:
        """How many grants came."""
        if self._dynamic and grants.lane is not None:
            pieces = [piece for piece in decode_pieces(grants.lane.pieces) if len(piece)]
            # a rank that begins anew is told of all its lane: it goes on where that ends
            self._place = max(self._have, grants.lane.dropped)
            self._have = grants.lane.dropped + sum(map(len, pieces))
            starts = np.array([piece.start for piece in pieces[-GRANTS:]], np.int64)
            self._wanted = list(dict.fromkeys(self._plan.plan_rows(starts)[0].tolist())) if len(starts) else []
        return len(grants.grants)


# -- core ----------------------------------------------------------------------------------------------------------


class Core:
    """A core with its store in memory, its workers registered and all ranks joined."""

    def __init__(self, folder: Path, manifest: Manifest, size: Size, order: str) -> None:
        self.files = Files(folder / f"core-{order}")
        self.files.store_manifest(manifest.digest, manifest.to_bytes())
        self.state = State(self.files, 10.0)
        self.store = MemoryStore()
        term = self.store.campaign("bench", 3600, lambda text: False)
        assert term is not None
        self.term: Term = term
        self.sequence = 0
        self.state.load({}, 0.0)
        self.run([(events.KeyDrawn, {"id": "k", "secret": b"s" * 32})])
        self.run([(events.WorkerRegistered, {"message": registering(n)}) for n in range(size.workers)])
        settings = settings_of(manifest, size.ranks, order, "sha256:" + "0" * 64)
        fields = {"drawn_seed": 1, "rows": manifest.rows}
        opens = [
            (events.JobOpenRequested, {"message": opening("big", r, settings), **fields}) for r in range(size.ranks)
        ]
        answers = self.run(opens)
        plan = Plan(manifest.shard_rows, seed=1, epoch=0, shuffle=settings.shuffle, lanes=1)
        self.askers = [Asker("big", r, opened, size.shards, plan) for r, opened in enumerate(answers)]
        self.seconds = {"apply": 0.0, "commit": 0.0}
        self.bytes = 0

    def run(self, group: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
        """Apply a group and commit it as the driver does; the answers."""
        began = time.process_time()
        done = []
        for number, (kind, fields) in enumerate(group, 1):
            done.append(self.state.apply(kind(at=1.0, now_ms=1_700_000_000_000, request=number, **fields)))
        applied = time.process_time()
        for puts, deletes in transactions(done):
            self.sequence = self.store.commit(self.term, self.sequence, puts, deletes)
        answers = [effect.answer for effects in done for effect in effects if isinstance(effect, Reply)]
        if hasattr(self, "seconds"):
            self.seconds["apply"] += applied - began
            self.seconds["commit"] += time.process_time() - applied
            self.bytes += sum(len(e.value) for effects in done for e in effects if isinstance(e, Put))
        for answer in answers:
            if isinstance(answer, FeedlineError):
                raise answer
        return answers

    def rounds(self, rounds: int, group: int = 64) -> int:
        """Every rank asks ``rounds`` times; how many grants came."""
        count = 0
        for _ in range(rounds):
            for at in range(0, len(self.askers), group):
                some = self.askers[at : at + group]
                answers = self.run([(events.GrantsRequested, {"message": asker.ask()}) for asker in some])
                count += sum(asker.took(answer) for asker, answer in zip(some, answers))
                reports = [report for asker in some if (report := asker.report()) is not None]
                self.run([(events.ProgressReported, {"message": report}) for report in reports])
        return count


def core(folder: Path, manifest: Manifest, size: Size, rounds: int, profile: bool) -> Figures:
    """Grants per second of decisions alone, and with commits to memory."""
    found: Figures = {}
    for order in ORDERS:
        try:
            bench = Core(folder, manifest, size, order)
        except FeedlineError as error:
            print(f"core, {order}: {error}")
            continue
        bench.rounds(3)
        apply, whole = [], []
        for _ in range(rounds):
            bench.seconds = {"apply": 0.0, "commit": 0.0}
            count = bench.rounds(16)
            apply.append(count / bench.seconds["apply"])
            whole.append(count / sum(bench.seconds.values()))
        bench.bytes = 0
        grants = bench.rounds(1)
        found |= {
            f"core, {order}: grants per CPU second, deciding alone": statistics.median(apply),
            f"core, {order}: grants per CPU second, with group commit to memory": statistics.median(whole),
            f"core, {order}: bytes stored per grant": bench.bytes / max(1, grants),
            f"core, {order}: records in the store": len(bench.store.backend.records),
        }
        if profile:
            profiler = cProfile.Profile(time.process_time)
            profiler.runcall(bench.rounds, 4)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(18)
    return found


# -- service -------------------------------------------------------------------------------------------------------


class Beats:
    """Heartbeats of simulated workers, a third of the lease apart, from one thread; they register when not known."""

    def __init__(self, addresses: str, workers: int, every: float) -> None:
        self._client = Client(parse_addresses(addresses), timeout=2.0)
        self._workers, self._every = workers, every
        self._stop = threading.Event()
        for number in range(workers):
            self._client.call(registering(number), m.WorkerWelcome)
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(self._every / self._workers):
            number = (number + 1) % self._workers
            try:
                welcome = self._client.call(m.Heartbeat(id=f"w{number}", incarnation="i"), m.WorkerWelcome)
                if not welcome.known:
                    self._client.call(registering(number), m.WorkerWelcome)
            except FeedlineError:
                continue

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self._client.close()


def open_all(address: str, job: str, manifest: Manifest, ranks: int, order: str) -> m.JobOpened:
    """All ranks open the job; the answer of the last one."""
    spec = codec.encode(m.JobSpec(fields=(manifest.fields,), labels=({},)))
    with Client(parse_addresses(address), timeout=60.0) as client:
        client.call(m.PutBlob(digest=digest(spec), data=spec), m.Done)
        settings = settings_of(manifest, ranks, order, digest(spec))
        for rank in range(ranks):
            opened: m.JobOpened = client.call(opening(job, rank, settings), m.JobOpened)
    return opened


def load_main(text: str) -> int:
    """A client process: ``ranks`` ask from ``threads`` threads, as fast as they can or ``rate`` times a second."""
    order = json.loads(text)
    rows = np.full(order["shards"], ROWS, np.int64)
    opened = codec.decode(bytes.fromhex(order["opened"]), m.JobOpened)
    plan = Plan(rows, seed=1, epoch=0, shuffle=opened.settings.shuffle, lanes=1)
    connection = Connection(parse_address(order["address"]))
    threads, end, begin = order["threads"], order["end"], order["begin"]
    times: list[list[tuple[float, int]]] = [[] for _ in range(threads)]
    faults: list[str] = []

    def work(number: int) -> None:
        askers = [Asker(order["job"], r, opened, order["shards"], plan) for r in order["ranks"][number::threads]]
        turn = 0
        due = begin
        while askers and time.time() < end:
            if order["rate"]:
                due += threads / order["rate"]
                time.sleep(max(0.0, due - time.time()))
            asker = askers[turn % len(askers)]
            turn += 1
            began = time.perf_counter()
            try:
                count = asker.took(connection.call(asker.ask(), m.Grants, 10))
                took = time.perf_counter() - began
                if (report := asker.report()) is not None:
                    connection.call(report, m.Reported, 10)
            except (FeedlineError, PeerSilent, PeerUnreachable) as error:
                faults.append(str(error)[:200])
                continue
            if time.time() >= begin:
                times[number].append((took, count))

    running = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    connection.close()
    found = [item for some in times for item in some] or [(float("nan"), 0)]
    print(json.dumps({"times": [t for t, _ in found], "grants": sum(c for _, c in found), "faults": faults[:3]}))
    return 0


def put_load(
    address: str, job: str, opened: m.JobOpened, size: Size, seconds: float, rate: float, processes: int, threads: int
) -> tuple[float, list[float], list[str]]:
    """(grants per second, seconds of each ask, what went wrong) under a load."""
    begin = time.time() + 3.0
    children = []
    for number in range(processes):
        order = {
            "address": address, "job": job, "opened": codec.encode(opened).hex(), "shards": size.shards, "threads": threads,
            "ranks": list(range(number, size.ranks, processes)), "begin": begin, "end": begin + seconds,
            "rate": rate / processes,
        }  # fmt: skip
        command = [sys.executable, __file__, "--load", json.dumps(order)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    answers = [json.loads(child.communicate(timeout=seconds + 60)[0]) for child in children]
    times = [t for answer in answers for t in answer["times"]]
    return sum(a["grants"] for a in answers) / seconds, times, [f for a in answers for f in a["faults"]]


def service(folder: Path, manifest: Manifest, size: Size, seconds: float, rounds: int) -> Figures:
    """Grants per second and time of an ask of a dispatcher process on a real etcd, at saturation and at half of it."""
    found: Figures = {}
    cluster = LocalCluster(folder / "service", lease="10s", fsync=True)
    cluster.start(0)
    try:
        address = cluster.dispatchers[0].address
        process = psutil.Process(cluster.dispatchers[0].child.pid)
        etcd = psutil.Process(cluster.etcd.child.pid)
        with cluster.client(120.0) as client:
            client.register(manifest)
        beats = Beats(address, size.workers, 10.0 / 3)
        try:
            for order in ORDERS:
                try:
                    opened = open_all(address, f"big-{order}", manifest, size.ranks, order)
                except FeedlineError as error:
                    print(f"service, {order}: {error}")
                    continue
                rates, halves, fulls, cpu, etcd_cpu = [], [], [], [], []
                for _ in range(rounds):
                    before, etcd_before = sum(process.cpu_times()[:2]), sum(etcd.cpu_times()[:2])
                    began = time.time()
                    rate, times, faults = put_load(address, f"big-{order}", opened, size, seconds, 0, 2, 8)
                    cpu.append((sum(process.cpu_times()[:2]) - before) / (time.time() - began))
                    etcd_cpu.append((sum(etcd.cpu_times()[:2]) - etcd_before) / (time.time() - began))
                    for fault in faults:
                        print(f"service, {order}: {fault}")
                    rates.append(rate)
                    fulls.append(np.percentile(times, [50, 99]))
                    half = rate / GRANTS / 2
                    _, times, _ = put_load(address, f"big-{order}", opened, size, seconds / 2, half, 2, 8)
                    halves.append(np.percentile(times, [50, 99]))
                with cluster.client(10.0) as client:
                    status = client.document(m.GetStatus())
                found |= {
                    f"service, {order}: grants/s at saturation": statistics.median(rates),
                    f"service, {order}: ask p50 at saturation, 16 callers, ms": 1e3
                    * statistics.median(f[0] for f in fulls),
                    f"service, {order}: ask p99 at saturation, ms": 1e3 * statistics.median(f[1] for f in fulls),
                    f"service, {order}: ask p50 at half of it, ms": 1e3 * statistics.median(f[0] for f in halves),
                    f"service, {order}: ask p99 at half of it, ms": 1e3 * statistics.median(f[1] for f in halves),
                    f"service, {order}: dispatcher, CPUs busy while it lasts": statistics.median(cpu),
                    f"service, {order}: etcd, CPUs busy while it lasts": statistics.median(etcd_cpu),
                    f"service, {order}: dispatcher RSS, MB": process.memory_info().rss / 1e6,
                    f"service, {order}: etcd database, MB": status["etcd"]["db_bytes"] / 1e6,
                }
        finally:
            beats.close()
    finally:
        cluster.end()
    return found


# -- take-over -----------------------------------------------------------------------------------------------------


def takeover(folder: Path, manifest: Manifest, size: Size, rounds: int) -> Figures:
    """From the end of the leader's lease, and from its death, to the first grant of a standby."""
    found: Figures = {}
    for elsewhere in (False, True):
        if elsewhere and not _can_unshare():
            print("take-over, other host: not measured, this system does not allow a new pid namespace")
            continue
        ends, deaths = [], []
        for number in range(rounds):
            end, death = _one_takeover(folder / f"takeover-{elsewhere}-{number}", manifest, size, elsewhere)
            ends.append(end)
            deaths.append(death)
        where = "leader on another host" if elsewhere else "leader on the same host"
        found |= {
            f"take-over, {where}: from kill -9 to a grant, s": statistics.median(deaths),
            f"take-over, {where}: from the end of its lease to a grant, s": statistics.median(ends),
        }
    return found


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0


def _one_takeover(folder: Path, manifest: Manifest, size: Size, elsewhere: bool) -> tuple[float, float]:
    """Lease 3 s; all ranks have open grants. ``elsewhere``: the leader is in a pid namespace of its own, so that the
    standby cannot see that it is dead and has to wait for the lease."""
    lease = 3.0
    with contextlib.ExitStack() as stack:
        etcd = Etcd(folder / "etcd", log=folder / "etcd.log")
        etcd.start()
        stack.callback(etcd.stop)
        store = EtcdStore((etcd.address,))
        stack.callback(store.close)
        prefix = ["unshare", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"] if elsewhere else []
        leader, first = _dispatcher(stack, prefix, etcd, folder, lease)
        _, standby = _dispatcher(stack, [], etcd, folder, lease)
        with Client(parse_addresses(first), timeout=120.0) as client:
            client.register(manifest)
        addresses = f"{first},{standby}"
        beats = Beats(addresses, size.workers, lease / 3)
        stack.callback(beats.close)
        opened = open_all(first, "big", manifest, size.ranks, "deterministic")
        plan = Plan(manifest.shard_rows, seed=1, epoch=0, shuffle=opened.settings.shuffle, lanes=1)
        askers = [Asker("big", rank, opened, size.shards, plan) for rank in range(size.ranks)]
        with Client(parse_addresses(first), timeout=10.0) as client:
            for asker in askers:
                assert asker.took(client.call(asker.ask(), m.Grants)) == GRANTS
        old = store.leader()
        killed = time.monotonic()
        leader.send_signal(signal.SIGKILL)
        lease_end = _watch(store, old)
        connection = Connection(parse_address(standby))
        stack.callback(connection.close)
        while time.monotonic() < killed + 30:
            with contextlib.suppress(FeedlineError, PeerSilent, PeerUnreachable):
                if askers[0].took(connection.call(askers[0].ask(), m.Grants, 0.5)):
                    granted = time.monotonic()
                    return granted - lease_end[0], granted - killed
            time.sleep(0.01)
        raise RuntimeError("no grant within 30 s")


def _dispatcher(
    stack: contextlib.ExitStack, prefix: list[str], etcd: Etcd, folder: Path, lease: float
) -> tuple[subprocess.Popen[str], str]:
    """A dispatcher process that serves, and its address."""
    command = [
        *prefix, sys.executable, "-m", "dispatcher", "--etcd", str(etcd.address), "--store", str(folder / "store"),
        "--listen", "127.0.0.1:0", "--lease", f"{lease:g}s",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    stack.callback(_end, process)
    assert process.stdout is not None
    return process, process.stdout.readline().removeprefix("dispatcher ").strip()


def _watch(store: EtcdStore, old: str | None) -> list[float]:
    """A list whose item becomes the moment at which the leader's key is gone or another's."""
    found = [time.monotonic()]

    def run() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and store.leader() == old:
            found[0] = time.monotonic()
            time.sleep(0.005)

    threading.Thread(target=run, name="watch", daemon=True).start()
    return found


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


# -- manifest ------------------------------------------------------------------------------------------------------


def manifest_costs(folder: Path, manifest: Manifest, rounds: int) -> Figures:
    """Seconds and resident bytes to load the manifest, in processes of their own."""
    files = Files(folder / "files")
    files.store_manifest(manifest.digest, manifest.to_bytes())
    path = next((folder / "files").rglob("*.parquet"))
    found: Figures = {"manifest: file, MB": path.stat().st_size / 1e6}
    for who in ("client", "dispatcher"):
        runs = []
        for _ in range(rounds):
            order = json.dumps(
                {"who": who, "path": str(path), "folder": str(folder / "files"), "digest": manifest.digest}
            )
            command = [sys.executable, __file__, "--manifest", order]
            runs.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        found |= {
            f"manifest, {who}: load, s": statistics.median(run["seconds"] for run in runs),
            f"manifest, {who}: load, seconds of CPU": statistics.median(run["cpu"] for run in runs),
            f"manifest, {who}: RSS above import, MB": statistics.median(run["rss"] for run in runs),
            f"manifest, {who}: peak RSS above import, MB": statistics.median(run["peak"] for run in runs),
        }
    return found


def manifest_main(text: str) -> int:
    order = json.loads(text)
    process = psutil.Process()
    files = Files(Path(order["folder"])) if order["who"] == "dispatcher" else None
    before, peak_before = process.memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began, began_cpu = time.perf_counter(), time.process_time()
    manifest = files.manifest(order["digest"]) if files is not None else Manifest.load(order["path"])
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    rss = process.memory_info().rss - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - min(before, peak_before)
    assert manifest.rows
    print(json.dumps({"seconds": seconds, "cpu": cpu, "rss": rss / 1e6, "peak": peak / 1e6}))
    return 0


# -- the program ---------------------------------------------------------------------------------------------------


def parts(
    names: list[str], folder: Path, manifest: Manifest, size: Size, args: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Figures]]]:
    everything: dict[str, Callable[[], Figures]] = {
        "manifest": lambda: manifest_costs(folder, manifest, args.rounds),
        "core": lambda: core(folder, manifest, size, args.rounds, args.profile),
        "service": lambda: service(folder, manifest, size, args.seconds, args.rounds),
        "takeover": lambda: takeover(folder, manifest, size, args.rounds),
    }
    for name, run in everything.items():
        if not names or name in names:
            yield name, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which to run; none: all")
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0, help="of load at saturation, per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="where the core's time goes")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--manifest", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        return load_main(args.load)
    if args.manifest:
        return manifest_main(args.manifest)
    size = Size(args.shards, args.ranks, args.workers)
    manifest = big_manifest(size.shards)
    results: Figures = {}
    with tempfile.TemporaryDirectory(prefix="feedline-bench-") as folder:
        for name, run in parts(args.names, Path(folder), manifest, size, args):
            print(name, flush=True)
            found = run()
            for key, value in found.items():
                print(f"  {key:72s} {value:14,.3f}", flush=True)
            results |= found
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    size_of = {"shards": size.shards, "ranks": size.ranks, "workers": size.workers, "grants per ask": GRANTS}
    machine = {"cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0]}
    (build / "control_plane.json").write_text(
        json.dumps({"machine": machine, "size": size_of, "results": results}, indent=2)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
