"""Registered names of manifests."""

from __future__ import annotations

from manifests.errors import ConfigError, UnknownDataset
from manifests.identity import check_name
from manifests.wire import messages as m

from . import events
from .effects import Outbox
from .records import DatasetRecord

#: names listed in an error
LISTED = 20


class Datasets:
    """name -> version -> record; the highest ``order`` of a name is its last registration."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self.by_name: dict[str, dict[str, DatasetRecord]] = {}
        self._order = 0

    def load(self, record: DatasetRecord) -> None:
        self.by_name.setdefault(record.name, {})[record.version] = record
        self._order = max(self._order, record.order)

    def all(self) -> list[DatasetRecord]:
        """Every registered version, by name and order of registration."""
        return [
            record
            for name in sorted(self.by_name)
            for record in sorted(self.by_name[name].values(), key=lambda found: found.order)
        ]

    def find(self, name: str, version: str = "") -> DatasetRecord:
        """The record of ``name@version``; version "": the one registered last. Raises UnknownDataset."""
        versions = self.by_name.get(name)
        if not versions:
            raise UnknownDataset(
                f"unknown dataset {name!r}",
                cause="registered are: " + _listed(self.by_name) if self.by_name else "no dataset is registered",
                remedy="feedline manifest register FILE",
                detail={"datasets": sorted(self.by_name)[:LISTED]},
            )
        if not version:
            return max(versions.values(), key=lambda record: record.order)
        if version not in versions:
            raise UnknownDataset(
                f"unknown version {version!r} of dataset {name!r}",
                cause="registered versions are: " + _listed(versions),
                remedy="feedline manifest register FILE",
                detail={"versions": sorted(versions)[:LISTED]},
            )
        return versions[version]

    def on_find(self, event: events.DatasetFindRequested) -> None:
        record = self.find(event.message.name, event.message.version)
        self._out.reply(
            event.request,
            m.DatasetFound(
                name=record.name, version=record.version, digest=record.digest, rows=record.rows, shards=record.shards
            ),
        )

    def on_register(self, event: events.DatasetRegistrationRequested) -> None:
        ask = event.message
        check_name(ask.name, "dataset")
        check_name(ask.version, "version")
        known = self.by_name.get(ask.name, {}).get(ask.version)
        if known is not None and known.digest != ask.digest:
            raise ConfigError(
                f"{ask.name}@{ask.version} is registered with other content",
                cause=f"it is {known.digest}, this is {ask.digest}",
                remedy="register it under a new version",
                detail={"registered": known.digest, "asked": ask.digest},
            )
        if known is None:
            self._order += 1
            known = DatasetRecord(
                name=ask.name,
                version=ask.version,
                digest=ask.digest,
                order=self._order,
                rows=event.rows,
                shards=event.shards,
            )
            self.by_name.setdefault(ask.name, {})[ask.version] = known
            self._out.put(known)
            new = True
        else:
            new = False
        self._out.reply(
            event.request, m.DatasetRegistered(name=ask.name, version=ask.version, digest=ask.digest, new=new)
        )


def _listed(names: dict[str, DatasetRecord] | dict[str, dict[str, DatasetRecord]]) -> str:
    found = sorted(names)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return ", ".join(found[:LISTED]) + more
