"""Errors on the wire: the map of codes is total, and an error arrives as what was raised."""

import inspect
import json
import pickle

import pyarrow as pa
import pyarrow.flight as fl
import pytest

import trainer_client.errors
from manifests import errors
from manifests.errors import CODES, AccessDenied, ConfigError, FeedlineError, ProtocolError, from_code
from manifests.wire.flight import PeerSilent, PeerUnreachable, ReadCancelled, from_flight_error, to_flight_error

KINDS = [
    kind
    for kind in vars(errors).values()
    if inspect.isclass(kind) and issubclass(kind, FeedlineError) and kind is not FeedlineError
]


def test_the_map_of_codes_is_total():
    assert set(CODES.values()) == set(KINDS)
    assert all(CODES[kind.code] is kind for kind in KINDS)


def test_codes_are_kebab_case_class_names():
    assert ConfigError.code == "config-error"
    assert errors.TooManyBadSamples.code == "too-many-bad-samples"
    assert len({kind.code for kind in KINDS}) == len(KINDS) == 18


@pytest.mark.parametrize(
    ("kind", "standard"),
    [
        (errors.ConfigError, ValueError),
        (errors.DispatcherUnavailable, ConnectionError),
        (errors.WaitTimeout, TimeoutError),
        (errors.UnknownDataset, LookupError),
    ],
)
def test_errors_that_are_standard_ones_too(kind, standard):
    assert issubclass(kind, standard)


def test_users_import_all_of_them_from_the_client():
    public = set(trainer_client.errors.__all__)
    assert {kind.__name__ for kind in KINDS} | {"FeedlineError", "FeedlineWarning", "CODES", "from_code"} == public
    assert all(getattr(trainer_client.errors, name) is getattr(errors, name) for name in public)


def test_the_text_is_one_line_of_thing_cause_and_remedy():
    error = ConfigError("batch_size 0", cause="it is not above zero", remedy="use 1 or more")
    assert str(error) == "batch_size 0: it is not above zero (use 1 or more)"
    assert (error.message, error.cause, error.remedy, error.detail) == (
        "batch_size 0",
        "it is not above zero",
        "use 1 or more",
        {},
    )
    assert str(ConfigError("x")) == "x"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_arrives_as_it_was_raised(kind):
    raised = kind("thing", cause="why", remedy="what to do", detail={"rank": 1, "names": ["a"]})
    sent = to_flight_error(raised)
    body = json.loads(sent.extra_info)
    assert set(body) == {"code", "message", "detail"} and body["code"] == kind.code
    found = from_flight_error(sent, "peer")
    assert type(found) is kind
    assert (found.message, found.cause, found.remedy, found.detail) == (
        "thing",
        "why",
        "what to do",
        {"rank": 1, "names": ["a"]},
    )
    kept = pickle.loads(pickle.dumps(raised))
    assert type(kept) is kind and str(kept) == str(raised) and kept.detail == raised.detail


def test_stock_clients_see_an_error_of_the_right_class():
    assert isinstance(to_flight_error(AccessDenied("no")), fl.FlightUnauthorizedError)
    assert isinstance(to_flight_error(ConfigError("no")), fl.FlightServerError)
    raised = fl.FlightUnavailableError("gone")
    assert to_flight_error(raised) is raised


def test_anything_else_that_a_peer_raises_is_named_as_its_fault():
    found = from_flight_error(to_flight_error(KeyError("x")), "h:1")
    assert isinstance(found, ProtocolError) and str(found) == "h:1 failed: KeyError: 'x'"


def test_an_unknown_code_keeps_the_text():
    found = from_code("from-the-future", "it says so", {"cause": "c", "n": 1})
    assert isinstance(found, ProtocolError) and "from-the-future" in str(found) and "it says so" in str(found)
    assert found.detail == {"n": 1}


@pytest.mark.parametrize("info", [b"no json", b"[]", b"{}", b'{"code": "fenced"}', b"\xff\xfe", b"null"])
def test_odd_extra_info_is_a_broken_connection(info):
    assert isinstance(from_flight_error(fl.FlightServerError("odd", info), "h:1"), PeerUnreachable)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (fl.FlightTimedOutError("late"), PeerSilent),
        (fl.FlightUnavailableError("refused"), PeerUnreachable),
        (fl.FlightCancelledError("stopped"), PeerUnreachable),
        (pa.ArrowCancelled("stopped"), PeerUnreachable),
        (fl.FlightInternalError("reset"), PeerUnreachable),
        (pa.ArrowInvalid("bad stream"), PeerUnreachable),
        (OSError("broken pipe"), PeerUnreachable),
    ],
)
def test_faults_of_the_transport(raised, kind):
    found = from_flight_error(raised, "h:1")
    assert type(found) is kind and "h:1" in str(found) and "\n" not in str(found)


@pytest.mark.parametrize("raised", [fl.FlightCancelledError("x"), pa.ArrowCancelled("x")])
def test_only_what_this_side_cancelled_counts_as_cancelled(raised):
    """A server that shuts down cancels calls under way; taking that for our own closing would end threads silently."""
    assert type(from_flight_error(raised, "h:1")) is PeerUnreachable
    assert type(from_flight_error(raised, "h:1", ours=True)) is ReadCancelled
