"""``feedline manifest build | show | diff | verify | register``.

Exit status 0: done. 1: it failed; ``verify`` found shards that are missing or changed; ``register`` was refused. 2:
misuse.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from manifests.build import FORMATS, build
from manifests.compare import diff, verify
from manifests.errors import ConfigError
from manifests.manifest import Manifest
from manifests.schema import Field
from manifests.units import format_size

from ..client import connect, load_manifest
from ..options import add_dispatcher
from ..output import print_error, print_json, table

#: warnings that are printed one by one; of more only the count
MOST_WARNINGS = 50
_Progress = Callable[[int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The five subcommands."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        # no default here: it would overwrite what was given before the action
        sub.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document")
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
        sub.set_defaults(run_action=run)
        return sub

    sub = add("build", _build, "build a manifest from stored shards")
    sub.add_argument("src", metavar="SRC", nargs="+", help="a file, folder, glob, brace range, or several files")
    sub.add_argument("--name", required=True, metavar="N", help="name of the dataset")
    sub.add_argument("--version", required=True, metavar="V", help="version of the dataset")
    sub.add_argument("-o", "--output", required=True, metavar="FILE", help="where to write the manifest")
    sub.add_argument("--format", choices=FORMATS, metavar="F", help=f"{', '.join(FORMATS)} (default: found out)")
    sub.add_argument(
        "--split", choices=("first", "last"), default="first",
        help="cut tar member names into key and field at the first or last dot (default: first)",
    )  # fmt: skip
    sub.add_argument("--fast-id", action="store_true", help="size and mtime as content id, without reading the shards")
    sub.add_argument("--labels-from", metavar="FILE", help="take the class numbers of this manifest")
    sub = add("show", _show, "show what is in a manifest")
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("--shards", type=int, default=10, metavar="N", help="shards to list (default: 10)")
    sub = add("diff", _diff, "compare two manifests")
    sub.add_argument("a", metavar="A")
    sub.add_argument("b", metavar="B")
    sub = add("verify", _verify, "check that the shards are where and as the manifest says")
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("--content", action="store_true", help="read and hash all bytes, not only look at sizes")
    sub = add("register", _register, "make a manifest known to the dispatcher")
    sub.add_argument("file", metavar="FILE")
    add_dispatcher(sub)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    action: Callable[[argparse.Namespace], int] = args.run_action
    return action(args)


def _build(args: argparse.Namespace) -> int:
    labels = load_manifest(args.labels_from).labels if args.labels_from else None
    src = args.src[0] if len(args.src) == 1 else args.src
    with _bar("B", args.json) as progress:
        manifest = build(
            src,
            name=args.name,
            version=args.version,
            format=args.format,
            fast_id=args.fast_id,
            split=args.split,
            labels=labels,
            progress=progress,
        )
    for warning in manifest.warnings[:MOST_WARNINGS]:
        print(f"feedline: warning: {' '.join(warning.split())}", file=sys.stderr)
    if len(manifest.warnings) > MOST_WARNINGS:
        print(f"feedline: warning: and {len(manifest.warnings) - MOST_WARNINGS} more", file=sys.stderr)
    manifest.save(args.output)
    if args.json:
        print_json({**_document(manifest), "file": args.output, "warnings": list(manifest.warnings)})
    else:
        shards = f"{len(manifest.shards)} shards, {manifest.rows} rows, {format_size(manifest.stored_bytes)}"
        print(f"{manifest.name}@{manifest.version} {manifest.digest}\n{shards}, written to {args.output}")
    return 0


def _show(args: argparse.Namespace) -> int:
    manifest = load_manifest(args.file)
    listed = manifest.shards[: max(args.shards, 0)]
    if args.json:
        print_json({**_document(manifest), "shards_listed": [dataclasses.asdict(s) for s in listed]})
        return 0
    print(f"{manifest.name}@{manifest.version} {manifest.digest}")
    print(f"{len(manifest.shards)} shards, {manifest.rows} rows, {format_size(manifest.stored_bytes)}\n")
    print(
        table(
            ("FIELD", "TYPE", "MAY BE MISSING"),
            [(f.name, _type(f), "yes" if f.nullable else "") for f in manifest.fields],
        )
    )
    for field, numbers in manifest.labels.items():
        some = ", ".join(f"{c}={n}" for c, n in list(numbers.items())[:8])
        print(f"\nlabels of {field}: {len(numbers)} classes, {some}{', ..' if len(numbers) > 8 else ''}")
    if len(listed):
        rows = [(s.ordinal, s.format, s.rows, format_size(s.bytes), s.content_id[:19], s.uri) for s in listed]
        print("\n" + table(("SHARD", "FORMAT", "ROWS", "BYTES", "CONTENT", "URI"), rows))
    if len(manifest.shards) > len(listed):
        print(f"and {len(manifest.shards) - len(listed)} more")
    return 0


def _diff(args: argparse.Namespace) -> int:
    a, b = load_manifest(args.a), load_manifest(args.b)
    found = diff(a, b)
    parts = {name: getattr(found, name) for name in ("added", "removed", "changed", "shared")}
    if args.json:
        sides = {side: {"name": m.name, "version": m.version, "digest": m.digest} for side, m in (("a", a), ("b", b))}
        counts = {name: msgspec.to_builtins(part) for name, part in parts.items()}
        print_json({**sides, "same": a.digest == b.digest, **counts, "fields": list(found.schema)})
        return 0
    rows = [(name, part.shards, part.rows, format_size(part.bytes)) for name, part in parts.items()]
    print(table(("", "SHARDS", "ROWS", "BYTES"), rows))
    for line in found.schema:
        print(line)
    if a.digest == b.digest:
        print("same digest: the same data in the same order")
    return 0


def _verify(args: argparse.Namespace) -> int:
    manifest = load_manifest(args.file)
    with _bar("shards", args.json) as progress:
        problems = verify(manifest, args.content, progress)
    if args.json:
        found = [msgspec.to_builtins(p) for p in problems]
        print_json({**_document(manifest), "content": args.content, "ok": not problems, "problems": found})
    elif problems:
        print(table(("SHARD", "WHAT", "URI", "DETAIL"), [(p.ordinal, p.what, p.uri, p.detail) for p in problems]))
        print(f"{len(problems)} of {len(manifest.shards)} shards are not as the manifest says")
    else:
        how = "bytes and sizes match" if args.content else "all are there and have their sizes"
        print(f"{len(manifest.shards)} shards: {how}")
    return 1 if problems else 0


def _register(args: argparse.Namespace) -> int:
    manifest = load_manifest(args.file)
    with connect(args) as client:
        try:
            answer = client.register(manifest)
        except ConfigError as error:
            # the command was used rightly: it is the dispatcher that refuses, e.g. other content under this name
            print_error(error, args.json)
            return 1
    if args.json:
        print_json({"name": answer.name, "version": answer.version, "digest": answer.digest, "new": answer.new})
    else:
        print(f"{answer.name}@{answer.version} {answer.digest}")
    return 0


def _document(manifest: Manifest) -> dict[str, Any]:
    """What the JSON documents say about a manifest."""
    return {
        "name": manifest.name,
        "version": manifest.version,
        "digest": manifest.digest,
        "rows": manifest.rows,
        "shards": len(manifest.shards),
        "bytes": manifest.stored_bytes,
        "fields": [
            {
                "name": f.name,
                "kind": f.kind,
                "dtype": f.dtype,
                "shape": list(f.shape),
                "ndim": f.ndim,
                "nullable": f.nullable,
            }
            for f in manifest.fields
        ],
        "labels": manifest.labels,
    }


def _type(field: Field) -> str:
    if field.kind == "scalar":
        return field.dtype
    if field.kind == "tensor":
        return f"{field.dtype}[{', '.join(map(str, field.shape))}]"
    return f"{field.dtype}[..]" if field.kind == "ragged" else field.kind


@contextlib.contextmanager
def _bar(unit: str, quiet: bool) -> Iterator[_Progress | None]:
    """A progress bar on stderr, None where that is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    # only needed here, and only with the extra [local]
    try:
        from tqdm import tqdm
    except ImportError:
        yield None
        return
    with tqdm(unit=unit, unit_scale=unit == "B", unit_divisor=1024, file=sys.stderr, leave=False) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress
