"""How fast memory can be read here: ``read_bandwidth.c``, built with the system's C compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

_SOURCE = Path(__file__).with_name("read_bandwidth.c")
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC", "-pthread")


def compiler() -> str | None:
    """The C compiler of this machine: ``$CC``, or what is called cc."""
    return shutil.which(os.environ.get("CC", "cc"))


class Probe:
    """A buffer larger than any cache, read again and again.

    Args:
        threads: That read at once.
        megabytes: Size of the buffer.
    """

    def __init__(self, threads: int, megabytes: int = 600) -> None:
        self._threads = threads
        self._buffer = np.ones(megabytes * 1_000_000 // 8, np.uint64)
        self._sum = ctypes.c_uint64()

    def gigabytes_per_s(self) -> float:
        """Of one pass over the buffer.

        Raises:
            OSError: A thread could not be started.
        """
        data, size = self._buffer.ctypes.data, self._buffer.nbytes
        seconds = _library().read_once(data, size, self._threads, ctypes.byref(self._sum))
        if seconds <= 0:
            raise OSError(f"the read probe did not start with {self._threads} threads")
        return float(size / seconds / 1e9)


@cache
def _library() -> ctypes.CDLL:
    """The compiled probe.

    Raises:
        OSError: There is no C compiler.
    """
    program = compiler()
    if program is None:
        raise OSError("the read probe needs a C compiler; install one, or name it in $CC")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "read_bandwidth.so"
        subprocess.run([program, *_FLAGS, str(_SOURCE), "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
    library.read_once.restype = ctypes.c_double
    library.read_once.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_uint64),
    )
    return library
