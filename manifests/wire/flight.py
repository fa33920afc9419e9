"""The one file that touches Arrow Flight: connections, the server shell, and errors in both directions.

A control message is one ``DoAction`` of type ``feedline`` with an encoded message as body and one as result. Errors are
Flight errors whose ``extra_info`` is JSON ``{"code", "message", "detail"}``; transport faults become
``ConnectionError``-like errors here and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.flight as fl

from .. import errors
from ..errors import ConfigError, FeedlineError, ProtocolError, from_code
from . import codec
from . import messages as m
from .connection import Address, ConnectionOptions

ACTION = "feedline"
#: bytes of one chunk when a manifest file is sent through a stream
CHUNK = 1 << 20
#: largest upload, bytes
MAX_UPLOAD = 1 << 30
#: characters of an error's message, of its cause and of its remedy
MAX_TEXT = 1000
#: characters of an error's detail as JSON; longer lists in it are cut
MAX_DETAIL = 7000
_BLOB_SCHEMA = pa.schema([pa.field("data", pa.large_binary())])


class PeerUnreachable(ConnectionError):
    """Nothing answered at this address (refused, reset, gone). The caller decides whether to try elsewhere."""


class PeerSilent(TimeoutError):
    """The peer did not answer within the time given."""


class ReadCancelled(Exception):
    """The read was cancelled from this side."""


# -- errors --------------------------------------------------------------------------------------------------------


def to_flight_error(error: BaseException) -> fl.FlightError:
    """Any exception as the Flight error to raise from a server method."""
    if isinstance(error, fl.FlightError):
        return error
    if isinstance(error, FeedlineError):
        detail = {**error.detail, "cause": _short(error.cause), "remedy": _short(error.remedy)}
        body = {"code": error.code, "message": _short(error.message), "detail": detail}
        body["detail"] = _fitting(detail)
    else:
        body = {"code": "internal", "message": _short(f"{type(error).__name__}: {error}"), "detail": {}}
    info = json.dumps(body, default=str).encode()
    text = _short(str(error)) or type(error).__name__
    if isinstance(error, errors.AccessDenied):
        return fl.FlightUnauthorizedError(text, info)
    return fl.FlightServerError(text, info)


def _fitting(detail: dict[str, Any]) -> dict[str, Any]:
    """``detail`` with its lists cut, and without what still is too long."""
    for most in (64, 16, 4, 0):
        if len(json.dumps(detail, default=str)) <= MAX_DETAIL:
            return detail
        detail = {name: value[:most] if isinstance(value, list | tuple) else value for name, value in detail.items()}
    return {"cause": detail["cause"], "remedy": detail["remedy"]}


def _within(data: bytes, what: str, limit: int = codec.MAX_MESSAGE) -> bytes:
    """``data``, unless it is too large to be sent: then ``ProtocolError`` here, as gRPC would only break the connection."""
    if len(data) > limit:
        raise ProtocolError(f"{what} of {len(data)} bytes", cause=f"the limit is {limit}")
    return data


def _short(text: str) -> str:
    """Texts may quote what a client sent, and gRPC refuses to carry more than 16 KiB of error."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def from_flight_error(error: BaseException, peer: str, ours: bool = False) -> Exception:
    """A Flight or Arrow exception as what callers handle: a ``FeedlineError`` the peer raised, or a transport fault.

    ``ours``: this side cancelled. A server that shuts down cancels calls under way too, and that is a broken connection.
    """
    info = getattr(error, "extra_info", b"") or b""
    if info:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            body = json.loads(info)
            if body["code"] != "internal":
                return from_code(body["code"], body["message"], body.get("detail"))
            return ProtocolError(f"{peer} failed", cause=body["message"])
    if isinstance(error, fl.FlightTimedOutError):
        return PeerSilent(f"{peer} did not answer in time")
    if isinstance(error, (fl.FlightCancelledError, pa.ArrowCancelled)):
        if ours:
            return ReadCancelled(f"read from {peer} was cancelled")
        return PeerUnreachable(f"{peer} cancelled the call: it shuts down")
    if isinstance(error, fl.FlightUnavailableError):
        return PeerUnreachable(f"{peer} cannot be reached: {_first_line(error)}")
    if isinstance(error, (fl.FlightError, pa.ArrowException, OSError, StopIteration)):
        return PeerUnreachable(f"connection to {peer} broke: {_first_line(error)}")
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def _first_line(error: BaseException) -> str:
    """What an Arrow or gRPC error says, without what those layers wrap around it."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    text = lines[0].partition("with message: ")[2] or lines[0]
    text = text.partition(" gRPC client debug context")[0].rstrip(".")
    return (text.partition("last error: ")[2] or text)[:300]


# -- client side ---------------------------------------------------------------------------------------------------


class Stream:
    """One open ``DoGet``: iterate record batches with their metadata; ``cancel`` from any thread."""

    def __init__(self, reader: fl.FlightStreamReader, peer: str) -> None:
        self._reader: fl.FlightStreamReader | None = reader
        self._peer = peer
        self._cancelled = False

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, m.ReadPart | None]]:
        while (reader := self._reader) is not None:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            except Exception as error:
                failure = from_flight_error(error, self._peer, self._cancelled)
                del reader
                raise failure from None
            meta = chunk.app_metadata
            yield chunk.data, (codec.decode(meta.to_pybytes(), m.ReadPart) if meta is not None else None)

    def cancel(self) -> None:
        """Stop the read; a thread inside ``next()`` gets ``ReadCancelled``."""
        self._cancelled = True
        reader = self._reader
        if reader is not None:
            with contextlib.suppress(Exception):
                reader.cancel()

    def close(self) -> None:
        """Stop the read and let go of it; an exception that remembers this stream then holds no socket."""
        self.cancel()
        self._reader = None


#: connections of this process, for the question below
_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
#: this process was forked while its parent had connections: gRPC calls made here would never return
_forked = False


def _after_fork_in_child() -> None:
    global _forked
    _forked = _forked or any(connection.is_open for connection in list(_connections))


os.register_at_fork(after_in_child=_after_fork_in_child)


class Connection:
    """A reusable, thread-safe connection to one address; connects on first use."""

    def __init__(self, address: Address, options: ConnectionOptions | None = None) -> None:
        self.address = address
        self._options = options or ConnectionOptions()
        self._lock = threading.Lock()
        self._client: fl.FlightClient | None = None
        self._closed = False
        _connections.add(self)

    @property
    def is_open(self) -> bool:
        """It was used and not closed."""
        return self._client is not None

    def __repr__(self) -> str:
        return f"Connection({self.address}, {'open' if self._client else 'idle'})"

    def _flight(self) -> fl.FlightClient:
        if _forked:
            raise ConfigError(
                "no connection can be made in this process",
                cause="it was forked from one that had feedline connections, and gRPC does not survive that",
                remedy="start it with spawn or forkserver, or connect only after the fork",
            )
        with self._lock:
            if self._closed:
                raise ReadCancelled(f"connection to {self.address} is closed")
            if self._client is None:
                size = self._options.max_message
                self._client = fl.connect(
                    self.address.uri,
                    generic_options=[
                        ("grpc.max_send_message_length", size),
                        ("grpc.max_receive_message_length", size),
                        ("grpc.max_metadata_size", 64 << 10),
                        ("grpc.absolute_max_metadata_size", 64 << 10),
                        ("grpc.initial_reconnect_backoff_ms", 100),
                        ("grpc.min_reconnect_backoff_ms", 100),
                        ("grpc.max_reconnect_backoff_ms", 1000),
                        ("grpc.enable_http_proxy", 0),
                        ("grpc.use_local_subchannel_pool", 1),
                    ],
                )
            return self._client

    def call(self, message: m.Message, kind: Any, timeout: float | None = None) -> Any:
        """Send one control message and wait for its answer.

        Raises:
            FeedlineError: what the peer answered. PeerUnreachable, PeerSilent: nobody answered.
        """
        limit = self._options.connect_timeout if timeout is None else timeout
        try:
            action = fl.Action(ACTION, _within(codec.encode(message), f"message {type(message).__name__}"))
            results = list(self._flight().do_action(action, fl.FlightCallOptions(timeout=limit)))
        except Exception as error:
            raise from_flight_error(error, str(self.address), self._closed) from None
        if len(results) != 1:
            raise ProtocolError(f"{self.address} sent {len(results)} answers to one message")
        return codec.decode(results[0].body.to_pybytes(), kind)

    def read(self, ticket: bytes, timeout: float | None = None) -> Stream:
        """Start a ``DoGet``. ``timeout`` bounds the whole read, in seconds."""
        try:
            options = fl.FlightCallOptions(timeout=timeout) if timeout else fl.FlightCallOptions()
            return Stream(self._flight().do_get(fl.Ticket(_within(ticket, "ticket")), options), str(self.address))
        except Exception as error:
            raise from_flight_error(error, str(self.address), self._closed) from None

    def download(self, what: str, timeout: float) -> bytes:
        """Bytes the server offers under the ticket ``what`` (a manifest: ``manifest/<digest>``)."""
        data = bytearray()
        for batch, _ in self.read(what.encode(), timeout):
            for value in batch.column(0):
                data += value.as_buffer()
        return bytes(data)

    def upload(self, what: str, data: bytes, timeout: float) -> None:
        """Send bytes to be stored under the path ``what``; at most ``MAX_UPLOAD``."""
        _within(data, "upload", MAX_UPLOAD)
        try:
            writer, reader = self._flight().do_put(
                fl.FlightDescriptor.for_path(*what.split("/")), _BLOB_SCHEMA, fl.FlightCallOptions(timeout=timeout)
            )
            with contextlib.closing(writer):
                for batch in blob_batches(data):
                    writer.write_batch(batch)
                writer.done_writing()
                while reader.read() is not None:
                    pass
        except Exception as error:
            raise from_flight_error(error, str(self.address), self._closed) from None

    def close(self) -> None:
        """Close the connection; later calls raise ``ReadCancelled``."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()


def blob_batches(data: bytes) -> Iterator[pa.RecordBatch]:
    """``data`` in chunks, as record batches of one binary column."""
    view = memoryview(data)
    for start in range(0, max(len(data), 1), CHUNK):
        column = pa.array([bytes(view[start : start + CHUNK])], pa.large_binary())
        yield pa.record_batch([column], schema=_BLOB_SCHEMA)


# -- server side ---------------------------------------------------------------------------------------------------


class Handler(Protocol):
    """What a process offers over Flight. All methods are called on Flight's own threads, several at once, and raise
    ``FeedlineError`` for anything that goes wrong."""

    def handle(self, message: m.Request) -> m.Message:
        """Answer one control message."""

    def read(
        self, ticket: bytes, cancelled: Callable[[], bool]
    ) -> tuple[pa.Schema, Iterable[tuple[pa.RecordBatch, m.ReadPart | None]]]:
        """Open the stream of a ticket. The iterator is consumed on the same thread; ``cancelled`` is cheap to poll."""

    def store(self, path: tuple[str, ...], data: bytes) -> None:
        """Keep bytes a client uploaded."""

    def flights(self) -> Iterable[fl.FlightInfo]:
        """Datasets to list."""

    def flight_info(self, path: tuple[str, ...]) -> fl.FlightInfo:
        """Endpoints of a dataset, for stock Flight clients."""


class Server(fl.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """A Flight server around a handler. It serves from construction on, on threads of its own.

    Raises:
        ConfigError: the port is in use (gRPC alone would silently share it), or the host is not one of this machine.
    """

    def __init__(
        self, handler: Handler, listen: Address, options: ConnectionOptions | None = None, max_upload: int = MAX_UPLOAD
    ) -> None:
        check_port_free(listen)
        self._handler = handler
        self._max_upload = max_upload
        self._stopper: threading.Thread | None = None
        try:
            super().__init__(listen.uri)
        except Exception as error:
            raise ConfigError(f"cannot listen on {listen}", cause=_first_line(error)) from None
        self.address = Address(listen.host, self.port)
        if listen.port and (holders := count_listeners(listen.port)) > 1:
            self.stop()
            raise _port_in_use(listen, f"{holders} servers took it at the same moment")

    def stop(self, timeout: float = 10.0) -> bool:
        """Stop serving; waits for calls under way, at most ``timeout`` seconds. Safe to call twice.

        Returns False when a call has not ended: gRPC waits without end for a client that takes nothing.
        """
        if self._stopper is None:
            self._stopper = threading.Thread(target=self.shutdown, name="flight-stop", daemon=True)
            self._stopper.start()
        self._stopper.join(timeout)
        return not self._stopper.is_alive()

    def do_action(self, context: Any, action: fl.Action) -> Iterator[bytes]:
        try:
            if action.type != ACTION:
                raise ProtocolError(f"unknown action {action.type!r}", remedy=f"the only action is {ACTION!r}")
            message = codec.decode(action.body.to_pybytes(), m.Request)
            reply = self._handler.handle(message)
            answer = _within(codec.encode(reply), f"answer {type(reply).__name__} to {type(message).__name__}")
        except BaseException as error:
            raise to_flight_error(error) from None
        return iter([answer])

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [(ACTION, "typed control messages, see docs/protocol.md")]

    def do_get(self, context: Any, ticket: fl.Ticket) -> fl.FlightDataStream:
        try:
            schema, parts = self._handler.read(ticket.ticket, context.is_cancelled)
        except BaseException as error:
            raise to_flight_error(error) from None
        return fl.GeneratorStream(schema, _parts(parts))

    def do_put(self, context: Any, descriptor: fl.FlightDescriptor, reader: Any, writer: Any) -> None:
        try:
            if reader.schema.types not in ([pa.large_binary()], [pa.binary()]):
                raise ProtocolError("not an upload", cause="it must be a stream of one binary column")
            data = bytearray()
            for chunk in reader:
                for value in chunk.data.column(0):
                    data += value.as_buffer() or b""
                if len(data) > self._max_upload:
                    raise ProtocolError(f"upload of more than {self._max_upload} bytes")
            self._handler.store(tuple(p.decode() for p in descriptor.path), bytes(data))
        except BaseException as error:
            raise to_flight_error(error) from None

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[fl.FlightInfo]:
        try:
            found = list(self._handler.flights())
        except BaseException as error:
            raise to_flight_error(error) from None
        return iter(found)

    def get_flight_info(self, context: Any, descriptor: fl.FlightDescriptor) -> fl.FlightInfo:
        try:
            return self._handler.flight_info(tuple(p.decode() for p in descriptor.path or ()))
        except BaseException as error:
            raise to_flight_error(error) from None


def _parts(parts: Iterable[tuple[pa.RecordBatch, m.ReadPart | None]]) -> Iterator[Any]:
    iterator = iter(parts)
    try:
        for batch, meta in iterator:
            yield batch if meta is None else (batch, pa.py_buffer(codec.encode(meta)))
    except GeneratorExit:
        raise
    except BaseException as error:
        raise to_flight_error(error) from None
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def flight_info(
    fields: pa.Schema, path: tuple[str, ...], endpoints: list[tuple[bytes, list[str]]], rows: int, size: int
) -> fl.FlightInfo:
    """A FlightInfo: endpoints are (ticket, worker addresses)."""
    return fl.FlightInfo(
        fields,
        fl.FlightDescriptor.for_path(*path),
        [fl.FlightEndpoint(ticket, [f"grpc://{a}" for a in where]) for ticket, where in endpoints],
        rows,
        size,
    )


def check_port_free(listen: Address) -> None:
    """Raise ``ConfigError`` when something listens on this port. gRPC sets SO_REUSEPORT and would share it silently."""
    if not listen.port:
        return
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
            probe.listen(1)
        except socket.gaierror as error:
            raise ConfigError(f"cannot listen on {listen}", cause=str(error)) from None
        except OSError as error:
            raise _port_in_use(listen, error.strerror or str(error)) from None


def _port_in_use(listen: Address, cause: str) -> ConfigError:
    return ConfigError(f"cannot listen on {listen}", cause=f"port in use: {cause}", remedy="choose another port, or 0")


def count_listeners(port: int) -> int:
    """Sockets of this network namespace that listen on TCP ``port`` (0 where /proc does not tell)."""
    found = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                next(lines)
                for line in lines:
                    parts = line.split()
                    found += parts[3] == "0A" and int(parts[1].rpartition(":")[2], 16) == port
        except OSError:
            continue
    return found


__all__ = [
    "Connection", "Handler", "PeerSilent", "PeerUnreachable", "ReadCancelled", "Server", "Stream", "blob_batches",
    "check_port_free", "flight_info", "from_flight_error", "to_flight_error",
]  # fmt: skip
