"""Large memory pages for what is allocated while a session opens: the weights, as it packs them.

A step reads every weight once, and looks up the address of every page of them. With pages of 4 KiB
that is a fifth to a third of the time of a quantised step (374M parameters, in a virtual machine);
with pages of 2 MiB it is nothing. Linux gives large pages to memory that a program asks them for
(``madvise``), unless it is set to give them always or never, but onnxruntime does not ask.

So malloc is made to serve everything from its heap, instead of mappings of their own for large
blocks, the heap is grown once by as much as the weights take, and that stretch is advised before
anything lies in it. This needs glibc, and the main thread: others have small heaps of their own.
Elsewhere nothing is lost but the speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Of malloc.h and sys/mman.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_DEFAULT_MMAP_MAX = 65536
_ADVICE = 14
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LEAST = 16 << 20  # weights that fit the processor's own tables anyway
_OWN_MAPPING = 4 << 20  # what larger blocks get later; numpy asks for large pages from here on


@contextlib.contextmanager
def huge_pages(size: int) -> Iterator[None]:
    """Have up to ``size`` bytes that are allocated inside lie in large pages, where that is known.

    Afterwards malloc no longer adapts the size from which blocks get mappings of their own, and
    takes it to be 4 MiB.
    """
    library = _glibc() if size >= _LEAST else None
    if library is None:
        yield
        return
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, -1)  # never: what is advised would go before it is used
    try:
        _advise(library, size)
        yield
    finally:
        library.mallopt(_TRIM_THRESHOLD, 2 * _OWN_MAPPING)
        library.mallopt(_MMAP_THRESHOLD, _OWN_MAPPING)
        library.mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)


def _advise(library: ctypes.CDLL, size: int) -> None:
    """Grow the heap by ``size`` and ask for large pages there; nothing of it is used yet."""
    block = library.malloc(size)
    if block:
        start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (block + size) // mmap.PAGESIZE * mmap.PAGESIZE
        library.madvise(start, end - start, _ADVICE)  # a refusal leaves small pages
        library.free(block)


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc and the system gives large pages to those who ask."""
    try:
        if platform.libc_ver()[0] != "glibc" or "[madvise]" not in _SETTING.read_text():
            return None
        library = ctypes.CDLL(None)
        library.malloc.restype = ctypes.c_void_p
        library.malloc.argtypes = (ctypes.c_size_t,)
        library.free.argtypes = (ctypes.c_void_p,)
        library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        library.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    except (OSError, AttributeError):
        return None
    return library
