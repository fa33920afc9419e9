"""The loader's arguments, checked once and frozen. Nothing here opens a connection."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from manifests.cursor import divisors
from manifests.errors import ConfigError
from manifests.identity import check_name
from manifests.pipeline import Pipeline
from manifests.units import parse_size, parse_time
from manifests.wire.connection import Address, ConnectionOptions, parse_addresses
from manifests.wire.messages import Shuffle as WireShuffle


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """How rows are mixed.

    Attributes:
        buffer: rows of the job the keyed window spans; no row moves further than its lane's share of it. 0: no window.
        interleave: shards merged with each other in every lane.
        within_shard: rows of a shard in seeded order. Better mixed, but the whole shard must be at hand.
    """

    buffer: int = 4096
    interleave: int = 1
    within_shard: bool = False

    def __post_init__(self) -> None:
        _integer("Shuffle.buffer", self.buffer, 0)
        _integer("Shuffle.interleave", self.interleave, 1)
        if not isinstance(self.within_shard, bool):
            raise ConfigError(f"Shuffle.within_shard {self.within_shard!r} is not True or False")

    def wire(self) -> WireShuffle:
        """The form it has in messages."""
        return WireShuffle(buffer=self.buffer, interleave=self.interleave, within_shard=self.within_shard)


@dataclass(frozen=True)
class Mix:
    """Several datasets with weights. Comes later; the formats have room for it."""

    weights: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Settings of the connection and the process.

    Attributes:
        connection: how every hop is made (message size, time one call may take).
        tenant: label the job is accounted to.
        stall: seconds without any sign from a worker after which a read is issued again elsewhere.
        reads: reads in flight at the most.
        tls, token, shared_memory, isolate: come later.
    """

    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    tenant: str = "default"
    stall: float | str = 5.0
    reads: int = 8
    tls: Any = None
    token: str | None = None
    shared_memory: bool = False
    isolate: bool = False

    def __post_init__(self) -> None:
        check_name(self.tenant, "tenant")
        if not isinstance(self.connection, ConnectionOptions):
            raise ConfigError(f"ClientOptions.connection {self.connection!r} is not ConnectionOptions(..)")
        _integer("ClientOptions.reads", self.reads, 1)
        object.__setattr__(self, "stall", parse_time(self.stall, "ClientOptions.stall"))
        for name in ("tls", "token", "shared_memory", "isolate"):
            if getattr(self, name):
                raise _later(f"ClientOptions.{name}", "leave it out")


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Everything ``RemoteDataLoader`` was given, valid. Pickles."""

    address: tuple[Address, ...] | None
    dataset: str
    job: str
    batch_size: int
    pipeline: Pipeline | None
    rank: int | None
    world_size: int | None
    seed: int | None
    order: str
    shuffle: Shuffle | None
    lanes: int | None
    tail: str
    epochs: int | None
    resume: str | None
    on_error: str
    max_bad: int | float
    ack: str
    collate: Callable[[dict[str, Any]], Any] | None
    pin_memory: bool
    prefetch: int
    elastic: bool
    audit: bool
    timeout: float
    join_timeout: float
    options: ClientOptions

    @property
    def has_quotas(self) -> bool:
        """How many rows and steps a rank has is known before it has them."""
        return self.order == "deterministic" or not (self.elastic or self.tail == "ragged")

    @property
    def dataset_is_file(self) -> bool:
        """The dataset is a manifest file, not a registered name."""
        return "/" in self.dataset or self.dataset.endswith(".parquet")

    def addresses(self) -> tuple[Address, ...]:
        """Dispatcher addresses: those given, else ``$FEEDLINE_DISPATCHER``; read when the loader connects."""
        if self.address is not None:
            return self.address
        text = os.environ.get("FEEDLINE_DISPATCHER", "")
        if not text.strip():
            raise ConfigError("no dispatcher address", remedy="pass it, or set FEEDLINE_DISPATCHER=HOST:PORT")
        return parse_addresses(text, what="FEEDLINE_DISPATCHER")


def make_config(
    address: str | list[str] | tuple[str, ...] | None,
    *,
    dataset: Any,
    job: str,
    batch_size: int,
    pipeline: Pipeline | None,
    rank: int | None,
    world_size: int | None,
    seed: int | None,
    order: str,
    shuffle: Shuffle | None,
    lanes: int | None,
    tail: str,
    epochs: int | None,
    steps_per_epoch: int | None,
    resume: str | None,
    on_error: str,
    max_bad: int | float,
    ack: str,
    collate: Callable[[dict[str, Any]], Any] | None,
    pin_memory: bool,
    device: Any,
    prefetch: str | int,
    elastic: bool,
    audit: bool,
    timeout: float | str,
    join_timeout: float | str,
    options: ClientOptions,
) -> LoaderConfig:
    """Check every argument; the first that cannot work is named with its value.

    Raises:
        ConfigError: which argument, and what it may be.
    """
    if isinstance(address, str) and address.startswith("local:"):
        raise _later("address 'local://'", "start `feedline up` and give its address")
    parts = [address] if isinstance(address, str) else address
    if parts is not None and not (isinstance(parts, (list, tuple)) and all(isinstance(p, str) for p in parts)):
        raise ConfigError(
            f"dispatcher address {address!r} is not text or a list of it", remedy="write it like 127.0.0.1:7070"
        )
    if isinstance(dataset, Mix):
        raise _later("dataset=Mix(..)", "use one dataset")
    if not isinstance(dataset, str) or not dataset:
        raise ConfigError(f"dataset {dataset!r} is not a name", remedy="name[@version], or the path of a manifest file")
    if "/" not in dataset and not dataset.endswith(".parquet"):
        name, at, version = dataset.partition("@")
        check_name(name, "dataset")
        if at:
            check_name(version, "dataset version")
    _choice("order", order, ("deterministic", "dynamic"))
    _flag("elastic", elastic)
    _flag("audit", audit)
    if device is not None and str(device) != "cpu":
        raise _later(f"device={device!r}", "move the batch yourself: tensor.to(device, non_blocking=True)")
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise ConfigError(f"pipeline {pipeline!r} is not a Pipeline", remedy="Pipeline([DecodeImage(), ..])")
    if shuffle is not None and not isinstance(shuffle, Shuffle):
        raise ConfigError(f"shuffle {shuffle!r} is not Shuffle(..) or None")
    if not isinstance(options, ClientOptions):
        raise ConfigError(f"options {options!r} is not ClientOptions(..)")
    if collate is not None and not callable(collate):
        raise ConfigError(f"collate {collate!r} cannot be called")
    if steps_per_epoch is not None:
        raise ConfigError(
            "steps_per_epoch is for pipelines with a filter or one-to-many map", remedy="leave it out: len() is exact"
        )
    if resume is not None:
        _choice("resume", resume, ("latest",))
    _choice("tail", tail, ("pad", "drop", "ragged"))
    if elastic and order != "dynamic":
        raise ConfigError(
            "elastic=True needs order='dynamic'",
            cause="in deterministic order every rank has rows of its own, which no other can take over",
            remedy="pass order='dynamic', or leave elastic out",
        )
    if elastic and tail == "drop":
        raise ConfigError(
            "elastic=True and tail='drop' do not go together",
            cause="ranks of an elastic job take rows until there are none, so steps are not equal and nothing is dropped",
            remedy="use tail='ragged' or 'pad'",
        )
    _choice("on_error", on_error, ("raise", "skip"))
    _choice("ack", ack, ("next", "manual"))
    _integer("batch_size", batch_size, 1)
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size go together", cause=f"rank={rank}, world_size={world_size}")
    if rank is not None and world_size is not None:
        _integer("world_size", world_size, 1)
        _integer("rank", rank, 0)
        if rank >= world_size:
            raise ConfigError(f"rank {rank} is outside world_size {world_size}")
    if seed is not None and not (isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 1 << 63):
        raise ConfigError(f"seed {seed!r} is not an integer from 0 to 2**63 - 1")
    if lanes is not None:
        _integer("lanes", lanes, 1)
        if world_size is not None:
            check_lanes(lanes, world_size)
    if epochs is not None:
        _integer("epochs", epochs, 1)
    if isinstance(max_bad, bool) or not isinstance(max_bad, (int, float)) or not 0 <= max_bad < math.inf:
        raise ConfigError(f"max_bad {max_bad!r} is not a count (int) or a share (float from 0 to 1)")
    if isinstance(max_bad, float) and max_bad > 1:
        raise ConfigError(f"max_bad {max_bad!r} is a share above 1", remedy="an int is a count")
    return LoaderConfig(
        address=None if address is None else parse_addresses(address, what="dispatcher address"),
        dataset=dataset,
        job=check_name(job, "job"),
        batch_size=batch_size,
        pipeline=pipeline,
        rank=rank,
        world_size=world_size,
        seed=seed,
        order=order,
        shuffle=shuffle,
        lanes=lanes,
        tail=tail,
        epochs=epochs,
        resume=resume,
        on_error=on_error,
        max_bad=max_bad,
        ack=ack,
        collate=collate,
        pin_memory=bool(pin_memory),
        prefetch=parse_size(prefetch, "prefetch"),
        elastic=elastic,
        audit=audit,
        timeout=parse_time(timeout, "timeout"),
        join_timeout=parse_time(join_timeout, "join_timeout"),
        options=options,
    )


def check_lanes(lanes: int, world_size: int) -> None:
    """``ConfigError`` naming the world sizes that would do, unless ``world_size`` divides ``lanes``."""
    if lanes % world_size:
        raise ConfigError(
            f"world_size {world_size} does not divide lanes {lanes}",
            remedy=f"world sizes that do: {', '.join(map(str, divisors(lanes)))}",
        )


def _integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} {value!r} is not an integer of at least {least}")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} {value!r} is not True or False")


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} {value!r} is unknown", remedy=f"one of {', '.join(map(repr, allowed))}")


def _later(what: str, instead: str) -> ConfigError:
    return ConfigError(f"{what} comes in a later release", remedy=instead)
