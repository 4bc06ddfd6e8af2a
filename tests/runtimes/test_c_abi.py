"""The C++ runner through its C ABI, called from another language: this one, by ctypes.

Its own test (``runtimes/cpp/test.cpp``) replays the golden streams; here what a foreign caller sees
is compared with the Python runner. ``make test-cpp`` builds the library.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgelin.runtimes.sampler import Sampler, Sampling
from edgelin.runtimes.session import Bundle

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build" / "cpp" / "libedgelin.so"
FOLDER = ROOT / "runtimes" / "golden" / "fused" / "bundle"
PROMPT = [5, 6, 7, 100, 200, 33, 9] * 20  # more than two chunks

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="not built; see make test-cpp")


class Options(ctypes.Structure):
    _fields_ = (
        ("variant", ctypes.c_char_p),
        ("threads", ctypes.c_int),
        ("tested", ctypes.c_char_p),
    )


class Settings(ctypes.Structure):
    _fields_ = (
        ("temperature", ctypes.c_double),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("repetition_penalty", ctypes.c_double),
        ("seed", ctypes.c_uint64),
    )


@pytest.fixture(scope="module")
def library() -> Any:
    """The functions that are used here, with their types."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    found = ctypes.CDLL(str(LIBRARY))
    pointer = ctypes.c_void_p
    for name, result, *arguments in (
        ("edgelin_last_error", ctypes.c_char_p),
        ("edgelin_load", pointer, ctypes.c_char_p, ctypes.POINTER(Options)),
        ("edgelin_unload", None, pointer),
        ("edgelin_output_size", ctypes.c_size_t, pointer),
        ("edgelin_open", pointer, pointer, ctypes.c_size_t, ctypes.c_char_p),
        ("edgelin_close", None, pointer),
        ("edgelin_feed", ctypes.c_int, pointer, pointer, ctypes.c_size_t, pointer, pointer),
        ("edgelin_outputs", ctypes.POINTER(ctypes.c_float), pointer),
        ("edgelin_choose", ctypes.c_int64, pointer, ctypes.c_size_t, ctypes.POINTER(Settings)),
        ("edgelin_state_save", ctypes.c_int, pointer, ctypes.c_char_p),
        ("edgelin_state_load", ctypes.c_int, pointer, ctypes.c_char_p),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


@pytest.fixture
def bundle(library: Any) -> Iterator[int]:
    options = Options(b"model", 1, b"")
    handle = library.edgelin_load(os.fsencode(FOLDER), ctypes.byref(options))
    assert handle, library.edgelin_last_error()
    yield handle
    library.edgelin_unload(handle)


def _feed(library: Any, stream: int, ids: list[int], size: int) -> NDArray[np.float32]:
    array = np.array(ids, np.int64)
    assert library.edgelin_feed(stream, array.ctypes.data, len(ids), None, None) == 0
    return np.ctypeslib.as_array(library.edgelin_outputs(stream), (size,)).copy()


def test_tokens_and_answers_are_those_of_python(library: Any, bundle: int, tmp_path: Path) -> None:
    settings = {
        "temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01,
        "repetition_penalty": 1.2, "seed": 2**64 - 3,
    }  # fmt: skip
    given, sampler = Settings(*settings.values()), Sampler(Sampling(**settings))
    here = Bundle(FOLDER, variant="model", threads=1).stream()
    there = library.edgelin_open(bundle, 1, None)
    size = library.edgelin_output_size(bundle)
    ids = PROMPT
    for _ in range(80):
        wanted = here.feed(ids)
        np.testing.assert_allclose(_feed(library, there, ids, size), wanted, atol=2e-4)
        saved = here.saved()
        assert saved.text is not None
        token = sampler.choose(wanted, saved.text.recent, here.position)
        assert library.edgelin_choose(there, 0, ctypes.byref(given)) == token
        ids = [token]
    assert library.edgelin_state_save(there, os.fsencode(tmp_path / "a.state")) == 0
    here.load(tmp_path / "a.state")  # Python checks the file's hash, shapes and numbers
    library.edgelin_close(there)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_states_at_rest_in_fewer_bytes_are_read(
    library: Any, bundle: int, tmp_path: Path, dtype: str
) -> None:
    path, opened = tmp_path / "a.state", Bundle(FOLDER, variant="model", threads=1)
    one, two = opened.stream(), opened.stream()
    one.feed(PROMPT)
    one.save(path, dtype=dtype)
    two.load(path)
    there = library.edgelin_open(bundle, 1, None)
    assert library.edgelin_state_load(there, os.fsencode(path)) == 0
    size = library.edgelin_output_size(bundle)
    for ids in ([1], [2, 3, 4]):
        np.testing.assert_allclose(_feed(library, there, ids, size), two.feed(ids), atol=2e-4)
    library.edgelin_close(there)


def test_an_error_is_one_line(library: Any, bundle: int, tmp_path: Path) -> None:
    assert not library.edgelin_load(os.fsencode(tmp_path), None)
    error = library.edgelin_last_error().decode()
    assert "no bundle" in error and "\n" not in error


def test_header_is_plain_c() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    header = ROOT / "runtimes" / "cpp" / "edgelin.h"
    flags = ["-std=c99", "-pedantic-errors", "-Wall", "-Werror", "-fsyntax-only"]
    subprocess.run(["gcc", "-x", "c", *flags, header], check=True)


def test_handles_of_failed_calls_are_refused(library: Any, bundle: int, tmp_path: Path) -> None:
    """A caller that overlooked an error gets another one, not a crash."""
    ids = np.array([1], np.int64)
    assert library.edgelin_open(None, 1, None) is None
    assert b"no bundle or stream was given" in library.edgelin_last_error()
    for _ in range(2):  # an error does not spoil the next call
        assert library.edgelin_feed(None, ids.ctypes.data, 1, None, None) == -1
        assert library.edgelin_choose(None, 0, None) < 0
        assert library.edgelin_state_save(None, os.fsencode(tmp_path / "a")) == -1
        assert library.edgelin_state_load(None, os.fsencode(tmp_path / "a")) == -1
        assert not library.edgelin_outputs(None)
        assert library.edgelin_output_size(None) == 0
    for rows in (0, 2**62):
        assert library.edgelin_open(bundle, rows, None) is None
    stream = library.edgelin_open(bundle, 1, None)
    assert library.edgelin_feed(stream, None, 1, None, None) == -1
    assert library.edgelin_feed(stream, ids.ctypes.data, 1, None, None) == 0
    assert library.edgelin_state_save(stream, None) == -1
    assert library.edgelin_state_load(stream, b"") == -1
    assert b"no path" in library.edgelin_last_error()
    assert library.edgelin_choose(stream, 1, None) < 0  # a row that is not there
    library.edgelin_close(stream)
    library.edgelin_close(None)
    library.edgelin_unload(None)
