"""Read tickets: checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from manifests.errors import AccessDenied, ProtocolError
from manifests.wire import codec
from manifests.wire.messages import Grant, ReadTicket, SignedGrant

I64 = npt.NDArray[np.int64]

#: rows of one read, more is a broken client
MOST_ROWS = 1 << 26


class Authority(Protocol):
    """What a worker knows from its dispatcher. Any thread may ask."""

    def signing_keys(self) -> dict[str, bytes]:
        """Signing keys by id."""

    def now_ms(self) -> int:
        """Dispatcher time."""

    def refresh(self) -> None:
        """Ask the dispatcher for newer keys, at most for a moment; failing to is no error."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A read that may be done: row ``rows[i]`` of ``grants[which[i]]`` is its i-th row."""

    grants: tuple[Grant, ...]
    which: I64
    rows: I64
    ids: I64
    #: ties log lines together
    cause: str = ""


def open_ticket(data: bytes, worker: str, authority: Authority) -> Plan:
    """The read that ``data`` asks for.

    Raises:
        AccessDenied: a grant that is forged, altered, expired, for other workers, or for other rows.
        ProtocolError: not a ticket.
    """
    ticket: ReadTicket = codec.decode(data, ReadTicket)
    if not ticket.grants:
        raise ProtocolError("ticket without grants")
    grants = tuple(_grant(signed, worker, authority) for signed in ticket.grants)
    if len(ticket.which) % 4 or len(ticket.rows) % 8 or len(ticket.which) // 4 != len(ticket.rows) // 8:
        raise ProtocolError("malformed ticket", cause=f"{len(ticket.which)} and {len(ticket.rows)} bytes of rows")
    if ticket.rows:
        which = np.frombuffer(ticket.which, "<u4").astype(np.int64)
        rows: I64 = np.frombuffer(ticket.rows, "<i8").astype(np.int64)
    else:
        sizes = [grant.last_row - grant.first_row for grant in grants]
        _check_count(sum(sizes))
        which = np.repeat(np.arange(len(grants)), sizes)
        rows = np.concatenate([np.arange(grant.first_row, grant.last_row, dtype=np.int64) for grant in grants])
    _check_count(len(rows))
    if len(which) and int(which.max()) >= len(grants):
        raise ProtocolError("malformed ticket", cause=f"it names grant {int(which.max())} of {len(grants)}")
    first = np.array([grant.first_row for grant in grants], np.int64)[which]
    last = np.array([grant.last_row for grant in grants], np.int64)[which]
    outside = np.flatnonzero((rows < first) | (rows >= last))
    if len(outside):
        at = int(outside[0])
        raise AccessDenied(
            "ticket refused",
            cause=f"row {int(rows[at])} is outside of rows {int(first[at])} to {int(last[at])} of its grant",
        )
    ids = np.array([grant.first_id for grant in grants], np.int64)[which] + rows
    return Plan(grants, which, rows, ids, ticket.cause)


def _check_count(rows: int) -> None:
    if rows > MOST_ROWS:
        raise ProtocolError(f"read of {rows} rows", cause=f"the limit is {MOST_ROWS}", remedy="read in parts")


def _grant(data: bytes, worker: str, authority: Authority) -> Grant:
    signed: SignedGrant = codec.decode(data, SignedGrant)
    if signed.key not in authority.signing_keys():
        authority.refresh()  # signed with a key that was made a moment ago?
    grant = codec.open_signed(data, authority.signing_keys())
    if worker not in grant.workers:
        raise AccessDenied("ticket refused", cause=f"it is for {', '.join(grant.workers)}, this worker is {worker}")
    late = authority.now_ms() - grant.expires_ms
    if late >= 0:
        raise AccessDenied("ticket refused", cause=f"it expired {late} ms ago", remedy="ask for a new grant")
    if not 0 <= grant.first_row <= grant.last_row <= grant.rows:
        raise ProtocolError(f"grant of rows {grant.first_row} to {grant.last_row} of {grant.rows}")
    return grant
