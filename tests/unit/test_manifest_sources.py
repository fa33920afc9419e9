"""Names: brace ranges, natural order, uris, member names."""

from __future__ import annotations

import pytest

from manifests.errors import ConfigError
from manifests.scan.folder import folder_uri, open_folder_shard
from manifests.scan.local import path_of, uri_of
from manifests.scan.naming import split_name, text_of
from manifests.sources import braces, natural


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("plain.tar", ["plain.tar"]),
        ("s-{08..10}.tar", ["s-08.tar", "s-09.tar", "s-10.tar"]),
        ("s-{8..10}", ["s-8", "s-9", "s-10"]),
        ("s-{2..0}", ["s-2", "s-1", "s-0"]),
        ("{a,b}-{1..2}", ["a-1", "a-2", "b-1", "b-2"]),
        ("x{,y}", ["x", "xy"]),
        ("{a,{b,c}}", ["a", "b", "a", "c"]),
        ("{single}-{1..1}", ["{single}-1"]),
        ("{}{", ["{}{"]),
    ],
)
def test_braces(text: str, names: list[str]) -> None:
    assert list(braces(text)) == names


def test_absurd_ranges_are_refused() -> None:
    with pytest.raises(ConfigError, match="limit"):
        list(braces("{0..99999999999}"))


def test_natural_order() -> None:
    names = ["b", "a10", "a2", "a2b", "a", "a002", "2", "10"]
    assert sorted(names, key=natural) == ["2", "10", "a", "a002", "a2", "a2b", "a10", "b"]


@pytest.mark.parametrize("path", ["/a b/%20#?;.tar", "/é", b"/\xff\xfe".decode("utf-8", "surrogateescape")])
def test_uris_bring_back_any_path(path: str) -> None:
    assert path_of(uri_of(path)) == path
    assert uri_of(path).isascii()


@pytest.mark.parametrize("uri", ["s3://b/x.tar", "file://host/x", "/plain/path", "http://x/y"])
def test_other_schemes_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="not a local file"):
        path_of(uri)


def test_folder_uris() -> None:
    assert folder_uri("/r ä", "a&b=/1.png", "z#.png") == "folder:///r%20%C3%A4?first=a%26b%3D/1.png&last=z%23.png"
    for uri in ("folder:///x", "folder:///x?first=a", "file:///x?first=a&last=b", "folder://h/x?first=a&last=b"):
        with pytest.raises(ConfigError, match="not an image folder shard"):
            open_folder_shard(uri)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("a.jpg", ("a", "jpg"), ("a", "jpg")),
        ("d.x/a.b.JPG", ("d.x/a", "b.jpg"), ("d.x/a.b", "jpg")),
        ("end.", ("end", ""), ("end", "")),
        ("noext", None, None),
        (".hidden.jpg", None, None),
        ("d/.hidden.jpg", None, None),
        ("__meta__", None, None),
        ("__meta__/a.json", None, None),
        ("d/__x__.jpg", ("d/__x__", "jpg"), ("d/__x__", "jpg")),
        ("__key.jpg", ("__key", "jpg"), ("__key", "jpg")),
    ],
)
def test_member_names(name: str, first: tuple[str, str] | None, last: tuple[str, str] | None) -> None:
    assert split_name(name) == first
    assert split_name(name, "last") == last


def test_bytes_that_are_no_utf8_become_escapes() -> None:
    assert text_of("plain é") == "plain é"
    assert text_of(b"\xe9x".decode("utf-8", "surrogateescape")) == "\\xe9x"
