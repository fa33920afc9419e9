"""Quarantine over real workers: what they answer about a shard that is gone or broken, and what their death says."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa
from cluster import TestCluster

import manifests
from feedline.client import Client
from feedline.commands import status
from manifests.errors import FeedlineError, ShardChanged, ShardMissing
from manifests.identity import digest
from manifests.wire import codec
from manifests.wire import messages as m
from manifests.wire.connection import parse_address
from manifests.wire.flight import Connection, PeerSilent, PeerUnreachable


def write(folder: Path, shards: int) -> manifests.Manifest:
    folder.mkdir()
    for number in range(shards):
        table = pa.table({"x": pa.array(range(1000 * number, 1000 * (number + 1)), pa.int64())})
        with pa.OSFile(str(folder / f"{number}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return manifests.build(str(folder), name=folder.name, version="1")


class Reader:
    """One rank that asks for grants and reads with them, by hand."""

    def __init__(self, client: Client, manifest: manifests.Manifest) -> None:
        self.client, self.job = client, manifest.name
        client.register(manifest)
        spec = codec.encode(m.JobSpec(fields=(manifest.fields,), labels=(dict(manifest.labels),)))
        client.call(m.PutBlob(digest=digest(spec), data=spec), m.Done)
        settings = m.JobSettings(
            sources=(m.Source(digest=manifest.digest),), spec=digest(spec), pipeline="", batch_size=100
        )
        ask = m.OpenJob(job=self.job, rank=0, holder=m.Holder(uid="reader"), nonce="n", settings=settings)
        self.generation = client.call(ask, m.JobOpened).generation

    def ask(self, *shards: int, failures: tuple[m.ReadFailure, ...] = ()) -> m.Grants:
        message = m.AskGrants(
            job=self.job, generation=self.generation, rank=0, holder="reader", epoch=0,
            shards=tuple(m.ShardAsk(source=0, shard=shard) for shard in shards), failures=failures,
        )  # fmt: skip
        found: m.Grants = self.client.call(message, m.Grants)
        return found

    def read(self, grant: m.GrantInfo) -> int | m.ReadFailure:
        """Rows of the shard, read from the first worker of its grant, or how that failed."""
        connection = Connection(parse_address(grant.workers[0].address))
        ticket = codec.encode(m.ReadTicket(grants=(grant.signed,)))
        try:
            return sum(batch.num_rows for batch, _ in connection.read(ticket, timeout=10))
        except FeedlineError as error:
            code, text = error.code, str(error)
        except (PeerUnreachable, PeerSilent) as error:
            code, text = "unreachable", str(error)
        finally:
            with contextlib.suppress(ConnectionError):
                connection.close()
        return m.ReadFailure(worker=grant.workers[0].id, source=0, shard=grant.shard, code=code, message=text)


def test_a_shard_that_is_gone_and_one_that_is_damaged_are_set_aside(tmp_path: Path) -> None:
    """Each fails on both workers; the others are read on."""
    manifest = write(tmp_path / "broken", 6)
    (tmp_path / "broken" / "1.arrow").unlink()
    damaged = tmp_path / "broken" / "4.arrow"
    damaged.write_bytes(damaged.read_bytes()[:200].ljust(damaged.stat().st_size, b"x"))
    with TestCluster(workers=2) as cluster:
        with cluster.client() as client:
            reader = Reader(client, manifest)
            failures: tuple[m.ReadFailure, ...] = ()
            tried: dict[int, list[str]] = {1: [], 4: []}
            for _ in range(2):
                reply = reader.ask(*range(6), failures=failures)
                assert not reply.quarantined and len(reply.grants) == 6
                found = {grant.shard: reader.read(grant) for grant in reply.grants}
                assert {shard for shard, rows in found.items() if rows == 1000} == {0, 2, 3, 5}
                failures = tuple(failure for failure in found.values() if isinstance(failure, m.ReadFailure))
                for failure in failures:
                    tried[failure.shard].append(failure.worker)
            assert all(len(set(workers)) == 2 for workers in tried.values())  # another worker the second time
            reply = reader.ask(*range(6), failures=failures)
            assert [grant.shard for grant in reply.grants] == [0, 2, 3, 5]
            gone, changed = reply.quarantined
            assert (gone.shard, gone.code, changed.shard, changed.code) == (1, ShardMissing.code, 4, ShardChanged.code)
            assert gone.uri == manifest.shards[1].uri and "missing" in gone.reason and len(gone.workers) == 2
            text = status.jobs_table(client.document(m.GetStatus()))
        assert "job broken shard 1 is in quarantine" in text and "shard-changed on" in text
        cluster.restart_dispatcher()
        with cluster.client() as client:
            reader.client = client
            assert {found.shard for found in reader.ask(*range(6)).quarantined} == {1, 4}


def test_killed_and_restarted_workers_put_nothing_in_quarantine(tmp_path: Path) -> None:
    """Every worker dies twice under reads of the same shards. Each read is told of as a failure, and none counts."""
    manifest = write(tmp_path / "whole", 4)
    with TestCluster(workers=2) as cluster, cluster.client() as client:
        reader = Reader(client, manifest)
        told = 0
        failures: tuple[m.ReadFailure, ...] = ()
        for _ in range(2):
            grants = reader.ask(*range(4), failures=failures).grants
            assert len(grants) == 4
            for worker in cluster.workers:
                if worker.child.poll() is None:
                    cluster.kill(worker.child.name)
            found = [reader.read(grant) for grant in grants]
            failures = tuple(failure for failure in found if isinstance(failure, m.ReadFailure))
            assert len(failures) == 4 and {failure.code for failure in failures} == {"unreachable"}
            told += len(failures)
            cluster.add_worker()
            cluster.add_worker()
        reply = reader.ask(*range(4), failures=failures)
        assert told == 8 and not reply.quarantined
        assert [reader.read(grant) for grant in reply.grants] == [1000] * 4
        assert client.document(m.GetStatus())["jobs"][0]["quarantined"] == []
