"""Which cluster records and files belong to: one id, drawn once, kept in the store and in the store folder.

An etcd and a store folder of two different clusters would make up jobs over manifests that are not there. So each has
that id, and a dispatcher works only on two that agree. A side that has none and is empty gets the other's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from manifests.errors import ConfigError

from .store import Store, StoreUnavailable

log = logging.getLogger("dispatcher")

#: form of the records; a release reads those up to its own
FORMAT = 1
#: name of the file in the store folder
FILE = "cluster"


class Identity(msgspec.Struct, frozen=True):
    """A cluster's id, and the form of what it has stored."""

    id: str
    format: int = FORMAT

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def agree(store: Store, folder: Path, etcd: str) -> str:
    """The cluster's id, after both sides have it. ``etcd``: how messages name the store.

    Raises:
        ConfigError: they belong to two clusters, or to a newer release. StoreUnavailable: the store did not answer, or
            the folder's file cannot be read or written.
    """
    # in this order: another dispatcher that draws an id right now writes it to the store first
    filed = _parse(_read(folder), f"the store folder {folder}")
    stored = _parse(store.cluster(), f"etcd at {etcd}")
    if stored is None and filed is None:
        chosen = Identity(id=os.urandom(8).hex())
    elif stored is None and filed is not None:
        if store.load()[0]:
            raise _strangers(f"the records in etcd at {etcd} have no cluster id", f"{folder} is of cluster {filed.id}")
        chosen = filed
    elif filed is None and stored is not None:
        if _has_files(folder):
            raise _strangers(f"the files in {folder} have no cluster id", f"etcd at {etcd} is of cluster {stored.id}")
        if datasets := len(store.load("datasets/")[0]):
            log.warning(
                "the store folder %s is empty, but etcd at %s has %d datasets: is it the right one? Their manifests have to "
                "be registered again", folder, etcd, datasets,
            )  # fmt: skip
        chosen = stored
    elif stored is not None and filed is not None and stored.id != filed.id:
        raise _strangers(f"etcd at {etcd} is of cluster {stored.id}", f"{folder} of cluster {filed.id}")
    else:
        return stored.id if stored is not None else ""
    # another dispatcher may be first: what is in the store then counts
    agreed = _parse(store.cluster(chosen.encode()), f"etcd at {etcd}") or chosen
    written = _parse(_write(folder, agreed.encode()), f"the store folder {folder}") or agreed
    if agreed.id != written.id:
        raise _strangers(f"etcd at {etcd} is of cluster {agreed.id}", f"{folder} of cluster {written.id}")
    return agreed.id


def _strangers(one: str, other: str) -> ConfigError:
    return ConfigError(
        f"etcd and the store folder do not belong together: {one}, {other}",
        remedy="give the --etcd and --store of one cluster, or an empty etcd or folder for a new one",
    )


def _parse(text: str, where: str) -> Identity | None:
    if not text.strip():
        return None
    try:
        found = msgspec.json.decode(text, type=Identity)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where} has a cluster id that cannot be read", cause=str(error)) from None
    if found.format > FORMAT:
        raise ConfigError(
            f"{where} holds records of format {found.format}",
            cause=f"this release reads formats up to {FORMAT}",
            remedy="run the release that wrote them, or a newer one",
        )
    return found


def _read(folder: Path) -> str:
    try:
        return (folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StoreUnavailable(f"cannot read {folder / FILE}: {error.strerror or error}") from None


def _has_files(folder: Path) -> bool:
    return any(path.is_file() for path in folder.glob("*/*"))


def _write(folder: Path, text: str) -> str:
    """Make the file, all of it at once, unless there is one. Returns what it holds."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".cluster-") as made:
            made.write(text.encode())
            made.flush()
            os.fsync(made.fileno())
            os.chmod(made.name, 0o644)
            with contextlib.suppress(FileExistsError):
                os.link(made.name, folder / FILE)
        return _read(folder)
    except OSError as error:
        raise StoreUnavailable(f"cannot write {folder / FILE}: {error.strerror or error}") from None
