"""Compiled pipelines: columns, pictures, nulls and bad rows."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from manifests.pipeline import (
    Cast,
    CenterCrop,
    DecodeImage,
    HorizontalFlip,
    Normalize,
    Pipeline,
    Resize,
    Select,
)
from manifests.schema import Field, arrow_schema
from worker.decode import decoder
from worker.formats import StoredRows
from worker.pipeline import Executor, Made

JPG = Field(name="jpg", kind="bytes")
N = Field(name="n", kind="scalar", dtype="int64", nullable=True)
FLAG = Field(name="flag", kind="scalar", dtype="bool")
TXT = Field(name="txt", kind="string", nullable=True)
VEC = Field(name="vec", kind="tensor", dtype="int16", shape=(2, 3))
BOX = Field(name="box", kind="ragged", dtype="float32", ndim=1)
PIC = Field(name="pic", kind="tensor", dtype="uint8", shape=(8, 6, 3))


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def made(steps: list[Any], columns: dict[Field, Any], bad: dict[int, str] | None = None, present: Any = None) -> Made:
    arrays = {
        f.name: value if isinstance(value, pa.Array) else pa.array(value, f.arrow_type())
        for f, value in columns.items()
    }
    rows = len(next(iter(arrays.values())))
    executor = Executor(Pipeline(steps), tuple(columns), decoder())
    stored = StoredRows({f.name: arrays[f.name] for f in executor.needs}, [f"k{i}" for i in range(rows)], bad or {})
    work = executor.start(stored, np.arange(100, 100 + rows), 1, 2, present)
    for position in work.rows:
        work.row(position)
    result = work.finish()
    assert result.batch.schema == executor.schema == arrow_schema(executor.fields)
    assert result.batch.column("__id__").to_pylist() == (100 + result.kept).tolist()
    result.batch.validate(full=True)
    return result


def tensor(values: np.ndarray) -> pa.Array:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))


def test_stored_columns_pass_untouched() -> None:
    vec = tensor(np.arange(18, dtype=np.int16).reshape(3, 2, 3))
    got = made(
        [], {N: [1, 2, 3], TXT: ["a", None, "c"], VEC: vec, BOX: [[1.0], [], [2.0, 3.0]], FLAG: [True, False, True]}
    )
    assert not got.bad
    assert got.batch.column("vec").storage.buffers()[-1].address == vec.storage.buffers()[-1].address
    assert got.batch.column("txt").to_pylist() == ["a", None, "c"]
    assert got.batch.column("flag").to_pylist() == [True, False, True]


def test_nulls_in_numbers_make_the_row_bad_and_change_no_other_case_45() -> None:
    """case 45: the dtype does not depend on the values, and 2**53 + 1 survives beside a null."""
    got = made([], {N: [2**53 + 1, None, 7], TXT: [None, "x", None]})
    assert got.batch.column("n").to_pylist() == [2**53 + 1, 7]
    assert got.batch.column("txt").to_pylist() == [None, None]
    assert got.bad == {1: "field 'n' is null; the row has txt"}
    assert made([], {N: [None, None]}).batch.num_rows == 0


def test_the_reason_lists_what_the_row_has() -> None:
    got = made([Select(["n"])], {N: [None] * 40, TXT: ["x"] * 40}, present=lambda i: ["txt", f"f{i}"])
    assert got.bad[3] == "field 'n' is null; the row has txt, f3"
    assert got.bad[39] == "field 'n' is null; the row has no field"


@pytest.mark.parametrize("part", ["list", "tensor"])
def test_a_null_inside_a_value(part: str) -> None:
    if part == "list":
        got = made([], {BOX: [[1.0], [None, 2.0], []]})
    else:
        storage = pa.array([[1] * 6, [1, None, 1, 1, 1, 1], [2] * 6], pa.list_(pa.int16(), 6))
        got = made([], {VEC: pa.ExtensionArray.from_storage(VEC.arrow_type(), storage)})
    assert list(got.bad) == [1] and "has an element that is null" in got.bad[1]


def test_fill() -> None:
    vec = pa.ExtensionArray.from_storage(VEC.arrow_type(), pa.array([None, [1] * 6], pa.list_(pa.int16(), 6)))
    got = made(
        [Select(["n", "txt", "vec", "box"], fill={"n": -1, "txt": "-", "vec": 9, "box": [0.5]})],
        {N: [None, 2**60], TXT: [None, "a"], VEC: vec, BOX: [None, []]},
    )
    assert got.batch.column("n").to_pylist() == [-1, 2**60]
    assert got.batch.column("txt").to_pylist() == ["-", "a"]
    assert got.batch.column("vec").to_numpy_ndarray().tolist() == [[[9] * 3] * 2, [[1] * 3] * 2]
    assert got.batch.column("box").to_pylist() == [[0.5], []]
    assert not got.bad


def test_fill_before_and_after_cast() -> None:
    before = made([Select(["n"], fill={"n": 3}), Cast("float32", field="n")], {N: [None, 1]})
    after = made([Cast("float32", field="n"), Select(["n"], fill={"n": 0.5})], {N: [None, 1]})
    assert before.batch.column("n").to_pylist() == [3.0, 1.0]
    assert after.batch.column("n").to_pylist() == [0.5, 1.0]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64"])
def test_cast_of_each_kind(dtype: str) -> None:
    steps = [Cast(dtype, field=name) for name in ("n", "vec", "box", "flag")]
    values = np.array([[[1, 0, 2], [3, 4, 5]], [[0, 0, 0], [7, 8, 9]]], np.int16)
    got = made(steps, {N: [1, 0], VEC: tensor(values), BOX: [[1.9, 0.0], []], FLAG: [True, False]})
    assert got.batch.column("n").to_pylist() == np.array([1, 0]).astype(dtype).tolist()
    assert got.batch.column("vec").storage.values.to_pylist() == values.reshape(-1).astype(dtype).tolist()
    assert got.batch.column("box").to_pylist() == [np.array([1.9, 0.0], np.float32).astype(dtype).tolist(), []]
    assert got.batch.column("flag").to_pylist() == np.array([1, 0]).astype(dtype).tolist()


def test_cast_cuts_and_never_warns() -> None:
    got = made([Cast("int32", field="box")], {BOX: [[1.9, -1.9, float("nan"), 1e30], None]})
    assert got.batch.column("box").to_pylist()[0][:2] == [1, -1]
    assert list(got.bad) == [1]


def test_sliced_columns() -> None:
    columns = {N: pa.array([9, None, 5, 6])[2:], BOX: pa.array([[0.0], [1.0], None, [2.0]], BOX.arrow_type())[2:]}
    got = made([Cast("int8", field="n"), Cast("int8", field="box")], columns)
    assert got.batch.column("n").to_pylist() == [6] and got.batch.column("box").to_pylist() == [[2]]


def test_pictures_go_straight_into_one_array() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (4, 10, 12, 3), np.uint8)
    got = made([DecodeImage(), CenterCrop((6, 8))], {JPG: [png(p) for p in pixels], N: [0, 1, 2, 3]})
    assert np.array_equal(got.batch.column("image").to_numpy_ndarray(), pixels[:, 2:8, 2:10])
    got = made(
        [DecodeImage(), CenterCrop((6, 8)), HorizontalFlip(1), Normalize(0.5, 2, scale=0.01)],
        {JPG: [png(p) for p in pixels]},
    )
    wanted = ((pixels[:, 2:8, 9:1:-1].transpose(0, 3, 1, 2) * 0.01 - 0.5) / 2).astype(np.float32)
    assert np.abs(got.batch.column("image").to_numpy_ndarray() - wanted).max() < 1e-6


def test_ragged_pictures() -> None:
    shapes = [(3, 5), (9, 2), (1, 1)]
    pixels = [np.full((h, w, 3), 7 * h + w, np.uint8) for h, w in shapes]
    got = made([DecodeImage()], {JPG: [png(pixels[0]), b"no", png(pixels[1]), png(pixels[2])]})
    rows = got.batch.column("image").to_pylist()
    assert [tuple(row["shape"]) for row in rows] == [(h, w, 3) for h, w in shapes]
    assert [row["data"] for row in rows] == [p.reshape(-1).tolist() for p in pixels]
    assert got.kept.tolist() == [0, 2, 3] and list(got.bad) == [1]
    normalized = made([DecodeImage(), Normalize(0, 1, scale=1)], {JPG: [png(pixels[0])]}).batch.column("image")
    assert normalized.to_pylist()[0]["shape"] == [3, 3, 5]
    assert made([DecodeImage()], {JPG: [b""]}).batch.num_rows == 0


def test_grey_pictures_have_one_channel() -> None:
    got = made([DecodeImage(mode="L"), Resize((4, 4))], {JPG: [png(np.full((8, 8), 9, np.uint8))]})
    assert got.batch.column("image").to_numpy_ndarray().tolist() == [[[[9]] * 4] * 4]


def test_a_crop_larger_than_the_picture_is_a_bad_sample() -> None:
    got = made(
        [DecodeImage(), CenterCrop(8)], {JPG: [png(np.zeros((8, 7, 3), np.uint8)), png(np.zeros((8, 8, 3), np.uint8))]}
    )
    assert got.bad == {0: "field 'jpg': picture of 8 x 7 is smaller than CenterCrop((8, 8)); put Resize before it"}
    assert got.batch.num_rows == 1


def test_a_missing_picture_may_be_filled_with_another() -> None:
    spare = png(np.full((2, 2, 3), 9, np.uint8))
    steps = [Select(["jpg", "n"], fill={"jpg": spare}), DecodeImage(), CenterCrop(2)]
    got = made(steps, {JPG: [None, png(np.zeros((2, 2, 3), np.uint8))], N: [1, 2]})
    assert not got.bad and got.batch.column("image").to_numpy_ndarray()[:, 0, 0, 0].tolist() == [9, 0]


def test_rows_already_bad_are_not_decoded() -> None:
    got = made([DecodeImage()], {JPG: [None, png(np.zeros((2, 2, 3), np.uint8))]}, bad={0: "header is damaged"})
    assert got.bad == {0: "header is damaged"} and got.batch.num_rows == 1


def test_stored_pictures() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (3, 8, 6, 3), np.uint8)
    got = made([Resize((4, 3), field="pic", interpolation="nearest")], {PIC: tensor(pixels)})
    assert got.batch.column("pic").to_numpy_ndarray().shape == (3, 4, 3, 3)
    storage = pa.array([pixels[0].reshape(-1).tolist(), None], pa.list_(pa.uint8(), 144))
    column = pa.ExtensionArray.from_storage(PIC.arrow_type(), storage)
    filled = made([Select(["pic"], fill={"pic": 5}), CenterCrop(2, field="pic")], {PIC: column})
    assert filled.batch.column("pic").to_numpy_ndarray()[1].tolist() == [[[5] * 3] * 2] * 2
    assert list(made([CenterCrop(2, field="pic")], {PIC: column}).bad) == [1]


def test_only_what_is_needed_is_read() -> None:
    executor = Executor(Pipeline([DecodeImage(), Select(["n"])]), (JPG, N, TXT), decoder())
    assert [f.name for f in executor.needs] == ["n"]
    assert executor.row_bytes == 16
    assert Executor(Pipeline(), (N, TXT), decoder()).row_bytes is None


def test_no_rows() -> None:
    for steps in ([], [DecodeImage()], [DecodeImage(), CenterCrop(4), Normalize(0, 1)]):
        got = made(steps, {JPG: [], N: [], VEC: pa.nulls(0, VEC.arrow_type()), BOX: []})
        assert got.batch.num_rows == 0 and not got.bad
