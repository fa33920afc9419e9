"""What all tests share: the environment etcd's client needs, and the check that nothing is left behind."""

import os

# before anything imports protobuf: the etcd3 package needs it, see dispatcher/etcd_store.py
os.environ["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
os.environ.pop("FEEDLINE_DISPATCHER", None)

import gc
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Examples do not depend on the run or on how busy the machine is. `make nightly` draws many more, from a seed that it
# prints and takes again.
hypothesis.settings.register_profile(
    "feedline",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "nightly",
    deadline=None,
    max_examples=2000,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "feedline"))

#: folders whose tests start processes
_PROCESS_FOLDERS = ("tests/process/", "tests/conformance/store/")
#: seconds after a test in which what it started may still go away
_CLEAN_WITHIN = 5.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in item.path.as_posix() for folder in _PROCESS_FOLDERS):
            item.add_marker(pytest.mark.process)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that starts processes: no child, thread, file descriptor or shared memory segment of it is left."""
    if request.node.get_closest_marker("process") is None:
        yield
        return
    before = _Snapshot()
    yield
    gc.collect()
    deadline = time.monotonic() + _CLEAN_WITHIN
    while (left := _Snapshot().more_than(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left behind after {_CLEAN_WITHIN:g} s: {left}"


class _Snapshot:
    """What this process holds right now."""

    def __init__(self) -> None:
        self.threads = {thread for thread in threading.enumerate() if thread.is_alive()}
        self.children = {child.pid: _describe(child) for child in psutil.Process().children(recursive=True)}
        self.segments = {entry.name for entry in Path("/dev/shm").iterdir()} if Path("/dev/shm").is_dir() else set()
        self.files = _open_files()

    def more_than(self, before: "_Snapshot") -> list[str]:
        left = [f"thread {thread.name}" for thread in self.threads - before.threads]
        left += [f"child {pid} {text}" for pid, text in self.children.items() if pid not in before.children]
        left += [f"/dev/shm/{name}" for name in self.segments - before.segments if "feedline" in name]
        left += [f"file {number} {target}" for number, target in self.files.items() if number not in before.files]
        return left


def _describe(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return "(gone)"


def _open_files() -> dict[str, str]:
    """Descriptors of files, sockets and pipes; what gRPC keeps once per process (event and epoll descriptors) and the
    interpreter's caches do not count."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").is_dir() else []:
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if not target.startswith(("anon_inode:", "/dev/", "/proc/", "/memfd:")):
            found[entry.name + target] = target
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=1, help="seed of random faults (make chaos prints the one it takes)")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed of random faults: {config.getoption('--seed')}"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Seed for random moments and choices of faults; fixed in ``make test``, drawn and printed by ``make chaos``."""
    return int(request.config.getoption("--seed"))
