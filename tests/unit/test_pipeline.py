"""Pipelines as descriptions: arguments checked, canonical bytes, digests, and what comes out of given fields."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from manifests.errors import ConfigError
from manifests.pipeline import (
    Cast,
    CenterCrop,
    DecodeImage,
    HorizontalFlip,
    Normalize,
    Pipeline,
    PythonMap,
    RandomResizedCrop,
    Resize,
    Select,
    shorter_side,
)
from manifests.schema import Field

JPG = Field(name="jpg", kind="bytes")
CLS = Field(name="cls", kind="scalar", dtype="int64")
TXT = Field(name="txt", kind="string", nullable=True)
KEY = Field(name="__key__", kind="string")
VEC = Field(name="vec", kind="tensor", dtype="float64", shape=(3,), nullable=True)
BOX = Field(name="box", kind="ragged", dtype="float32", ndim=1, nullable=True)
PIC = Field(name="pic", kind="tensor", dtype="uint8", shape=(8, 6, 3))

TRAIN = Pipeline(
    [
        DecodeImage(),
        RandomResizedCrop(224, scale=(0.2, 1)),
        HorizontalFlip(),
        Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        Select(["image", "cls"]),
    ]
)


def output(steps: list[object], *fields: Field) -> dict[str, Field]:
    return {f.name: f for f in Pipeline(steps).output(fields)}  # type: ignore[arg-type]


# -- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: DecodeImage(3), "field=3"),
        (lambda: DecodeImage(mode="CMYK"), "mode='CMYK'"),
        (lambda: DecodeImage(out=""), "out=''"),
        (lambda: DecodeImage(max_pixels=0), "max_pixels=0"),
        (lambda: DecodeImage(device="tpu"), "device='tpu'"),
        (lambda: DecodeImage(orient=1), "orient=1"),
        (lambda: DecodeImage(fallback="gpu"), "fallback='gpu'"),
        (lambda: Resize(0), "size=0"),
        (lambda: Resize((1, 2, 3)), r"size=\(1, 2, 3\)"),
        (lambda: Resize(2.5), "size=2.5"),
        (lambda: Resize(True), "size=True"),
        (lambda: Resize("224"), "size='224'"),
        (lambda: Resize(8, interpolation="box"), "interpolation='box'"),
        (lambda: Resize(8, interpolation="lanczos", antialias=False), "antialias=False"),
        (lambda: CenterCrop(-1), "size=-1"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 0.1)), "scale="),
        (lambda: RandomResizedCrop(8, scale=(0.5, 1.5)), "scale="),
        (lambda: RandomResizedCrop(8, ratio=(0, 1)), "ratio="),
        (lambda: HorizontalFlip(1.5), "p=1.5"),
        (lambda: HorizontalFlip("half"), "p='half'"),
        (lambda: Normalize([0.5, 0.5], [0.1, 0.1, 0.1]), "std="),
        (lambda: Normalize(0.5, 0), "std=0"),
        (lambda: Normalize("0.5", 1), "mean='0.5'"),
        (lambda: Normalize(float("nan"), 1), "mean=nan"),
        (lambda: Cast("float31"), "dtype='float31'"),
        (lambda: Select("image"), "fields='image'"),
        (lambda: Select([]), r"fields=\[\]"),
        (lambda: Select(["a", "a"]), "fields="),
        (lambda: Select(["a"], fill={"b": 1}), "fill="),
        (lambda: PythonMap("nope", "1"), "function='nope'"),
        (lambda: PythonMap("a.b:c", "1", timeout=0), "timeout=0"),
        (lambda: Pipeline(DecodeImage()), "cannot work"),
        (lambda: Pipeline(["resize"]), "not a pipeline step"),
    ],
)
def test_a_bad_argument_is_in_the_message(make: Callable[[], object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()


@pytest.mark.parametrize(
    "step", [PythonMap("a.b:c", "1"), DecodeImage(device="mixed"), DecodeImage(device="gpu"), DecodeImage(dali={})]
)
def test_what_comes_later_says_so(step: object) -> None:
    with pytest.raises(ConfigError, match=r"comes later \(.+\)"):
        Pipeline([step])  # type: ignore[list-item]


def test_only_the_first_argument_is_positional() -> None:
    for make in (lambda: Resize(8, "image"), lambda: DecodeImage("jpg", "image"), lambda: Select(["a"], {})):
        with pytest.raises(TypeError):
            make()  # type: ignore[no-untyped-call]


def test_steps_are_frozen_and_hashable() -> None:
    step = Select(["a"], fill={"a": 1})
    with pytest.raises(AttributeError):
        step.fields = ("b",)  # type: ignore[misc]
    assert len({step, Resize(8), Resize((8, 8)), DecodeImage()}) == 4


# -- identity ------------------------------------------------------------------------------------------------------


def test_golden_digests() -> None:
    """Digests are stored with jobs and states: they must never change for the same steps."""
    assert Pipeline().digest == GOLDEN["empty"]
    assert TRAIN.digest == GOLDEN["train"]
    assert Pipeline([Resize(8, antialias=False), CenterCrop((4, 6)), Cast("float16")]).digest == GOLDEN["plain"]
    assert Pipeline([Select(["a", "b"], fill={"a": -1, "b": [1.5]})]).digest == GOLDEN["fill"]


GOLDEN = {
    "empty": "sha256:a49403bba02c27e5c3c6cf56a893925369fe7246b3e11c1e971da262cb170cfc",
    "train": "sha256:7b2ccda09fb04adbf1310aec08692c9dcde19739f07cb4d885bd8c308bb2406c",
    "plain": "sha256:fc232dcaf74d9d589c6183bfe9ede0b48fd88d7c4cd848b09630d03fa188c718",
    "fill": "sha256:4440525084e2d2410a508909e21ad01a4ce844fa370c21240fc7dcab88c9ac5c",
}


def test_equal_meaning_equal_bytes() -> None:
    assert Pipeline([CenterCrop(8)]) == Pipeline([CenterCrop((8, 8))]) == Pipeline((CenterCrop([8, 8]),))
    assert Pipeline([Normalize(0, 1)]).digest == Pipeline([Normalize((0.0,), [1])]).digest
    assert Pipeline([Resize(8)]) != Pipeline([Resize((8, 8))])
    assert Pipeline([HorizontalFlip(1)]) == Pipeline([HorizontalFlip(1.0)])
    assert Pipeline([Select(["a"], fill={"a": 1})]) != Pipeline([Select(["a"], fill={"a": 1.0})])
    assert hash(Pipeline([CenterCrop(8)])) == hash(Pipeline([CenterCrop((8, 8))]))


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(),
        TRAIN,
        Pipeline([Resize((3, 4)), Select(["a"], fill={"a": b"x"})]),
        Pipeline([DecodeImage("x", out="y")]),
    ],
)
def test_encode_decode_and_pickle(pipeline: Pipeline) -> None:
    assert Pipeline.decode(pipeline.encode()) == pipeline
    assert Pipeline.decode(pipeline.encode()).steps == pipeline.steps
    assert pickle.loads(pickle.dumps(pipeline)) == pipeline
    assert repr(pipeline).startswith("Pipeline([")


def test_decode_of_other_bytes() -> None:
    assert Pipeline.decode(b"") == Pipeline()
    data = TRAIN.encode()
    for bad in (b"FLP\x02" + data[4:], b"x", data[:-3], data.replace(b"normalize/1", b"normalize/9")):
        with pytest.raises(ConfigError):
            Pipeline.decode(bad)
    with pytest.raises(ConfigError, match="unknown arguments"):
        Pipeline.decode(data.replace(b"ratio", b"ratia"))


def test_prefix_and_random() -> None:
    assert TRAIN.random and not Pipeline([DecodeImage(), Resize(8)]).random
    assert TRAIN.prefix_digest == Pipeline([DecodeImage()]).digest
    fixed = Pipeline([DecodeImage(), HorizontalFlip(1.0), HorizontalFlip(0.0)])
    assert not fixed.random and fixed.prefix_digest == fixed.digest


# -- inference -----------------------------------------------------------------------------------------------------


def test_without_steps_the_stored_fields_come_out() -> None:
    assert Pipeline().output((JPG, CLS, TXT, KEY)) == (JPG, CLS, TXT, KEY)
    assert not Pipeline().output((VEC,))[0].nullable


def test_decoded_pictures_are_ragged_until_their_size_is_fixed() -> None:
    ragged = Field(name="image", kind="ragged", dtype="uint8", ndim=3)
    assert Pipeline([DecodeImage()]).output((CLS, JPG, KEY)) == (CLS, ragged, KEY)
    assert output([DecodeImage(), Resize(32)], JPG)["image"] == ragged
    for step in (Resize((32, 48)), CenterCrop((32, 48)), RandomResizedCrop((32, 48))):
        assert output([DecodeImage(), step], JPG)["image"] == Field("image", "tensor", "uint8", (32, 48, 3))
        assert output([DecodeImage(mode="L"), step], JPG)["image"].shape == (32, 48, 1)


def test_normalize_and_cast() -> None:
    chw = output([DecodeImage(), CenterCrop((4, 6)), Normalize(0.5, 0.5)], JPG)["image"]
    assert chw == Field("image", "tensor", "float32", (3, 4, 6))
    assert output([DecodeImage(), Normalize((0, 0, 0), 1)], JPG)["image"] == Field("image", "ragged", "float32", ndim=3)
    assert output([DecodeImage(), CenterCrop(4), Normalize(0, 1), Cast("float16")], JPG)["image"].dtype == "float16"
    assert output([Cast("float32", field="vec")], VEC)["vec"] == Field("vec", "tensor", "float32", (3,))
    assert output([Cast("int8", field="box")], BOX)["box"].dtype == "int8"


def test_stored_pictures_need_no_decoding() -> None:
    assert output([Resize(4, field="pic")], PIC)["pic"].shape == (5, 4, 3)
    assert output([CenterCrop(4, field="pic"), Normalize(0, 1, field="pic")], PIC)["pic"].shape == (3, 4, 4)


def test_select_keeps_order_and_fills() -> None:
    fields = Pipeline([Select(["cls", "txt", "vec"], fill={"txt": "", "vec": 0})]).output((JPG, TXT, VEC, CLS))
    assert [f.name for f in fields] == ["cls", "txt", "vec"]
    assert not fields[1].nullable


def test_the_picture_field_is_found_by_name() -> None:
    for name in ("png", "left.jpg", "IMAGE", "img"):
        assert "image" in output([DecodeImage()], Field(name=name, kind="bytes"), Field(name="json", kind="bytes"))
    two = (JPG, Field(name="b.png", kind="bytes"))
    assert list(output([DecodeImage("b.png", out="b"), DecodeImage(out="a")], *two)) == ["a", "b"]


@pytest.mark.parametrize(
    ("steps", "fields", "words"),
    [
        ([DecodeImage()], (JPG, Field(name="left.png", kind="bytes")), ["'jpg' and 'left.png'", "DecodeImage('jpg')"]),
        ([DecodeImage()], (CLS, Field(name="json", kind="bytes")), ["named like a picture", "cls, json"]),
        ([DecodeImage("png")], (JPG, CLS), ["'png'", "jpg, cls"]),
        ([DecodeImage("cls")], (JPG, CLS), ["scalar int64", "not encoded"]),
        ([DecodeImage(out="cls")], (JPG, CLS), ["already a field 'cls'"]),
        ([DecodeImage(), DecodeImage("image")], (JPG,), ["ragged uint8"]),
        ([Resize(8)], (JPG, CLS), ["'image'", "jpg, cls"]),
        ([Resize(8, field="jpg")], (JPG,), ["not pictures", "DecodeImage"]),
        ([DecodeImage(), CenterCrop(8), Normalize(0, 1), HorizontalFlip()], (JPG,), ["before Normalize"]),
        ([DecodeImage(), Normalize((0, 0), (1, 1))], (JPG,), ["2 means", "3 channels"]),
        ([DecodeImage(), Cast("float32"), Resize(8)], (JPG,), ["uint8"]),
        ([DecodeImage(), Resize((8, 8)), CenterCrop(9)], (JPG,), ["larger"]),
        ([Cast("int8", field="jpg")], (JPG,), ["bytes, not numbers"]),
        ([Select(["image"])], (JPG, CLS), ["'image'", "jpg, cls"]),
        ([Select(["cls"], fill={"cls": "x"})], (CLS,), ["fill='x'"]),
        ([Select(["cls"], fill={"cls": 0.5})], (CLS,), ["fill=0.5"]),
        ([Select(["cls"], fill={"cls": 2**63})], (CLS,), ["fill="]),
        ([Select(["txt"], fill={"txt": 1})], (TXT,), ["fill=1"]),
        ([Select(["box"], fill={"box": 1})], (BOX,), ["fill=1"]),
        ([DecodeImage(), Select(["image"], fill={"image": 0})], (JPG,), ["fill=0"]),
    ],
)
def test_steps_that_do_not_fit(steps: list[object], fields: tuple[Field, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as found:
        output(steps, *fields)
    for word in words:
        assert word in str(found.value)


@pytest.mark.parametrize(
    ("height", "width", "size", "wanted"),
    [(100, 200, 50, (50, 100)), (200, 100, 50, (100, 50)), (3, 10, 2, (2, 7)), (7, 3, 2, (5, 2)), (1, 1, 5, (5, 5))],
)
def test_the_other_side_is_rounded(height: int, width: int, size: int, wanted: tuple[int, int]) -> None:
    assert shorter_side(height, width, size) == wanted
