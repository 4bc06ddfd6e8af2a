"""Large pages: where a block lies, during and after, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgelin.runtimes import huge_pages
from edgelin.runtimes.buffers import _neighbours
from edgelin.state import StateSpec

# Allocates 32 MiB before, inside and after, and prints of each whether it lies in advised memory.
PROGRAM = """
import ctypes, sys, threading
from edgelin.runtimes.huge_pages import huge_pages

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
SIZE = 32 << 20

def advised(place):
    inside = False
    for line in open("/proc/self/smaps"):
        head = line.split()
        if "-" in head[0] and head[0][-1] != ":":
            start, end = (int(x, 16) for x in head[0].split("-"))
            inside = start <= place < end
        elif inside and head[0] == "VmFlags:":
            return "hg" in head
    raise LookupError(hex(place))

def block():
    place = libc.malloc(SIZE)
    ctypes.memset(place, 1, SIZE)
    return advised(place + SIZE // 2)

def run():
    found = [block()]
    with huge_pages(int(sys.argv[1])):
        found += [block(), block()]
    print(*found, block())

if sys.argv[2] == "thread":
    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
else:
    run()
"""


def run(size: int, where: str) -> str:
    """What the program prints."""
    command = [sys.executable, "-c", PROGRAM, str(size), where]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(huge_pages._glibc() is None, reason="this system gives no large pages so")
def test_blocks_inside_lie_in_large_pages() -> None:
    assert run(80 << 20, "main") == "False True True False"


def test_other_threads_have_other_heaps() -> None:
    if sys.platform == "linux":
        assert run(80 << 20, "thread") == "False False False False"


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_little_is_not_worth_it(size: int) -> None:
    if sys.platform == "linux":
        assert run(size, "main") == "False False False False"


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the setting, or with another one, nothing is called."""
    setting = tmp_path / "enabled"
    for content in (None, "always madvise [never]\n", "[always] madvise never\n"):
        huge_pages._glibc.cache_clear()
        monkeypatch.setattr(huge_pages, "_SETTING", setting)
        if content is not None:
            setting.write_text(content)
        assert huge_pages._glibc() is None
        with huge_pages.huge_pages(1 << 30):
            pass
    huge_pages._glibc.cache_clear()


def test_states_lie_side_by_side() -> None:
    """Also tensors of odd sizes and other types, and each begins at a line of the cache."""
    specs = [
        StateSpec("conv", 0, (3, 5), "batch channels time", initial=-2.0),
        StateSpec("position", None, (), "batch", dtype="int64"),
        StateSpec("recurrent", 0, (2, 64, 64), "batch heads key value"),
    ]
    a, n, b = _neighbours(specs, 3)
    assert (a.shape, n.shape, b.shape) == ((3, 3, 5), (3,), (3, 2, 64, 64))
    assert (a == -2).all() and not n.any() and not b.any() and n.dtype == np.int64
    assert a.ctypes.data % 64 == b.ctypes.data % 64 == 0
    assert b.ctypes.data - a.ctypes.data == 192  # 45 numbers in whole lines
