"""The codec on bytes that no peer of ours wrote: a typed error or a valid message, never anything else."""

import random

import msgspec
import pytest
from wire_samples import GRANT, KEY, KEY_ID, SAMPLES, SPEC, tag

from manifests.errors import AccessDenied, ProtocolError
from manifests.wire import codec
from manifests.wire import messages as m

ANY = m.Request | m.Reply | m.Grants | m.Grant | m.ReadTicket | m.ReadPart


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "not a feedline message"),
        (b"F", "not a feedline message"),
        (b"FL", "not a feedline message"),
        (b"GET / HTTP/1.1", "not a feedline message"),
        (b"FL\x00\x80", "protocol version 0.*speaks version 1.*same feedline release"),
        (b"FL\x02\x80", "protocol version 2"),
        (b"FL\x01", "malformed"),
        (b"FL\x01\x80", "malformed"),
        (b"FL\x01\xc0", "malformed"),
        (b"FL\x01\x90", "malformed"),
        (b"FL\x01" + msgspec.msgpack.encode({"t": "no-such"}), "malformed.*no-such"),
        (b"FL\x01" + msgspec.msgpack.encode({"t": "find-dataset", "version": "1"}), "malformed.*name"),
        (b"FL\x01" + msgspec.msgpack.encode({"t": "find-dataset", "name": 5, "version": ""}), "malformed.*name"),
        (b"FL\x01" + msgspec.msgpack.encode({"t": "hello"}) + b"\x00", "malformed"),
        (b"FL\x01" + b"\x91" * 5000 + b"\xc0", "malformed"),
        (b"FL\x01" + b"\x82\xa1t\xa5hello\xa5cause\xa2\xff\xfe", "malformed"),
    ],
)
def test_what_is_no_message(data, named):
    with pytest.raises(ProtocolError, match=named):
        codec.decode(data, ANY)


def test_a_message_that_is_too_large_is_not_looked_at():
    data = b"FL\x01" + bytes(codec.MAX_MESSAGE)
    with pytest.raises(ProtocolError, match="limit is 16777216"):
        codec.decode(data, ANY)


def test_a_message_of_another_kind_than_expected():
    with pytest.raises(ProtocolError, match="malformed"):
        codec.decode(codec.encode(m.Hello()), m.Grants)
    with pytest.raises(ProtocolError, match="malformed"):
        codec.decode(codec.encode(m.Done()), m.Request)


def test_views_of_memory_are_read():
    data = memoryview(b"xx" + codec.encode(GRANT))[2:]
    assert codec.decode(data, m.Grant) == GRANT


@pytest.mark.parametrize("sample", [*SAMPLES, SPEC], ids=[*map(tag, SAMPLES), "spec"])
def test_cut_anywhere_it_is_an_error(sample):
    data = codec.encode(sample)
    for end in range(len(data)):
        with pytest.raises(ProtocolError):
            codec.decode(data[:end], type(sample))


def test_altered_bytes_give_a_typed_error_or_a_valid_message():
    """Seeded fuzz: bits flipped, bytes inserted, removed and repeated in real messages, and noise after the head."""
    draw = random.Random(20260829)
    whole = [codec.encode(sample) for sample in SAMPLES]
    refused = 0
    for _ in range(20_000):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(3, len(data) + 1)
            match draw.randrange(5):
                case 0 if at < len(data):
                    data[at] ^= 1 << draw.randrange(8)
                case 1:
                    data[at:at] = draw.randbytes(draw.randint(1, 4))
                case 2:
                    del data[at : at + draw.randint(1, 9)]
                case 3:
                    data[at:at] = data[3:at]
                case _:
                    data = data[:3] + draw.randbytes(draw.randint(0, 40))
        try:
            found = codec.decode(bytes(data), ANY)
        except ProtocolError as error:
            assert error.code == "protocol-error" and "\n" not in str(error)
            refused += 1
        else:
            assert codec.decode(codec.encode(found), type(found)) == found
    assert refused > 10_000


# -- signatures ----------------------------------------------------------------------------------------------------


def test_a_signed_grant_opens_with_its_key_only():
    data = codec.sign(GRANT, KEY_ID, KEY)
    assert codec.open_signed(data, {"k0": bytes(32), KEY_ID: KEY}) == GRANT
    with pytest.raises(AccessDenied, match="lacks"):
        codec.open_signed(data, {"k0": KEY})
    with pytest.raises(AccessDenied, match="signature"):
        codec.open_signed(data, {KEY_ID: bytes(32)})
    with pytest.raises(AccessDenied, match="lacks"):
        codec.open_signed(data, {})


@pytest.mark.parametrize(
    "change",
    [
        {"last_row": 100},
        {"uri": "/etc/passwd"},
        {"generation": 5},
        {"expires_ms": 2**53},
        {"tenant": "other"},
        {"workers": ()},
    ],
)
def test_an_altered_grant_is_refused(change):
    signed = codec.decode(codec.sign(GRANT, KEY_ID, KEY), m.SignedGrant)
    forged = msgspec.structs.replace(signed, payload=codec.encode(msgspec.structs.replace(GRANT, **change)))
    with pytest.raises(AccessDenied, match="signature does not match"):
        codec.open_signed(codec.encode(forged), {KEY_ID: KEY})


@pytest.mark.parametrize("signature", [b"", b"\x00", bytes(32), bytes(64)])
def test_a_made_up_signature_is_refused(signature):
    forged = m.SignedGrant(key=KEY_ID, signature=signature, payload=codec.encode(GRANT))
    with pytest.raises(AccessDenied, match="signature does not match"):
        codec.open_signed(codec.encode(forged), {KEY_ID: KEY})


def test_every_flipped_bit_of_a_signed_grant_is_noticed():
    data = codec.sign(GRANT, KEY_ID, KEY)
    for at in range(len(data)):
        for bit in (1, 128):
            altered = bytearray(data)
            altered[at] ^= bit
            with pytest.raises((AccessDenied, ProtocolError)):
                codec.open_signed(bytes(altered), {KEY_ID: KEY})
