"""Which process is that, and is it dead for certain?

A lease tells that a process is gone after some seconds. On one host the kernel tells at once. ``ProcessId`` names a
process so that another one on the same kernel and in the same pid namespace can ask; from anywhere else the answer is
"not known", and the lease decides. This is only ever used to wait less: fencing keeps the right order either way.
"""

from __future__ import annotations

import os
import socket

import msgspec


class ProcessId(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process, told apart from a later one that got the same number."""

    host: str
    pid: int
    #: boot id and pid namespace; "" where the system does not tell
    kernel: str = ""
    #: start time in clock ticks since boot; 0 where the system does not tell
    started: int = 0

    @classmethod
    def current(cls) -> ProcessId:
        """This process."""
        pid = os.getpid()
        return cls(host=socket.gethostname(), pid=pid, kernel=_kernel(), started=_start_ticks(pid))

    def is_dead(self) -> bool:
        """True only if the process is certainly gone; False also when that cannot be told from here."""
        if not self.kernel or not self.started or self.kernel != _kernel():
            return False
        return _start_ticks(self.pid) != self.started

    def encode(self) -> str:
        """One line of text, for keys and ids."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """The inverse of ``encode``; None for anything else."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError:
            return None


def _kernel() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat; 0 for no such process, and for one that has ended but was not waited for."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            rest = file.read().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if rest[0] in ("Z", "X") else int(rest[19])
