"""Damaged shards: whatever the bytes, a scanner and a reader end in a typed outcome, soon."""

from __future__ import annotations

import io
import random
import re
import tarfile
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored_data import MemoryBytes, tar_bytes

from manifests.errors import FeedlineError
from manifests.scan.naming import Split
from worker.formats import FORMATS

#: no input here may take longer, seconds
_SOON = 2.0


def _mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, a part cut out, repeated or replaced, or the end cut off."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(out)) if out else 0
        kind = rng.randrange(6)
        if kind == 0 and out:
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at : at + rng.randrange(1, 1500)]
        elif kind == 2:
            out[at:at] = out[at : at + rng.randrange(1, 1500)]
        elif kind == 3:
            del out[at:]
        elif kind == 4:
            out[at : at + 12] = rng.choice(
                [b"\x80" + b"\xff" * 11, b"\xff" * 12, b"77777777777\0", b"-0000000001\0", bytes(12)]
            )
        else:
            # a header field with the checksum made right again: gets past the first guard
            block = at // 512 * 512
            header = out[block : block + 512]
            if len(header) == 512:
                field = rng.choice([(100, 8), (124, 12), (156, 1), (257, 8), (345, 20)])
                header[field[0] : field[0] + field[1]] = bytes(
                    rng.choice(b"01234567LKxgS5\0\x80\xff ") for _ in range(field[1])
                )
                header[148:156] = b" " * 8
                header[148:156] = b"%06o\0 " % (sum(header) & 0o777777)
                out[block : block + 512] = header
    return bytes(out)


def _check(format: str, data: bytes) -> None:
    source = MemoryBytes(data)
    start = time.monotonic()
    try:
        found = FORMATS[format].scan(source)
        rows = np.arange(min(found.index.rows, 200))
        read = FORMATS[format].read_rows(found.index, source, rows, found.fields, {})
        for column in read.columns.values():
            assert len(column) == len(rows)
            column.validate()
    except FeedlineError as error:
        assert "\n" not in str(error)
    assert time.monotonic() - start < _SOON


def _seed_tar(format: int) -> bytes:
    members = [
        part
        for n in range(6)
        for part in ((f"{'d' * 120 if n == 2 else ''}{n}.jpg", bytes(n * 300)), (f"{n}.cls", b"%d" % n))
    ]
    return tar_bytes(members if format != tarfile.USTAR_FORMAT else [(n[-90:], d) for n, d in members], format)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_mutated_tars(format: int) -> None:
    data, rng = _seed_tar(format), random.Random(f"tar-{format}")
    for _ in range(400):
        _check(rng.choice(["tar", "tar-last"]), _mutated(data, rng))


def test_mutated_arrow_files() -> None:
    table = pa.table({"x": list(range(50)), "s": [str(n) for n in range(50)], "l": [[n] * (n % 4) for n in range(50)]})
    rng = random.Random("arrow")
    for compression in (None, "lz4"):
        out = io.BytesIO()
        with pa.ipc.new_file(out, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table, max_chunksize=20)
        for _ in range(300):
            _check("arrow", _mutated(out.getvalue(), rng))


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=3000), st.sampled_from(sorted(FORMATS)))
def test_any_bytes(data: bytes, format: str) -> None:
    _check(format, data)
    for start in (b"ARROW1\0\0", b"FLDIR1\0\0"):
        _check(format, start + data + b"ARROW1")


_NAMES = st.text(st.sampled_from("ab.AB/_é "), min_size=1, max_size=12).filter(
    lambda n: n.strip("/.") and "//" not in n
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(_NAMES, st.binary(max_size=700)), max_size=12),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.sampled_from(["first", "last"]),
)
def test_any_tar_reads_as_tarfile_reads_it(members: list[tuple[str, bytes]], format: int, split: Split) -> None:
    """Keys, fields and bytes equal those got with ``tarfile`` and the rule written down again here."""
    members = [(name.strip("/"), data) for name, data in members]
    data = tar_bytes(members, format)
    expected: dict[str, dict[str, bytes]] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            folder, slash, base = member.name.rpartition("/")
            cut = base.find(".") if split == "first" else base.rfind(".")
            if cut > 0 and not base.startswith(".") and not re.match("__[^/]*__(/|$)", member.name):
                file = tar.extractfile(member)
                assert file is not None
                expected.setdefault(folder + slash + base[:cut], {})[base[cut + 1 :].lower()] = file.read()
    source = MemoryBytes(data)
    reader = FORMATS["tar" if split == "first" else "tar-last"]
    found = reader.scan(source)
    read = reader.read_rows(found.index, source, np.arange(found.index.rows), found.fields, {})
    columns = {name: column.to_pylist() for name, column in read.columns.items() if name != "__key__"}
    assert read.keys == list(expected)
    for at, row in enumerate(expected.values()):
        assert {n: c[at] for n, c in columns.items() if c[at] is not None} == row
