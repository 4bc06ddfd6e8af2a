"""Opening a bundle: file checks, the onnxruntime session, and the in-place self-test."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import psutil

from edgelin.errors import EdgelinError
from edgelin.runtimes import capsules, checks
from edgelin.runtimes.buffers import Buffers
from edgelin.runtimes.huge_pages import huge_pages
from edgelin.runtimes.manifest import METADATA_KEY, Manifest
from edgelin.runtimes.pool import Pool
from edgelin.runtimes.snapshots import Snapshot
from edgelin.runtimes.stream import Stream
from edgelin.runtimes.text import TextCodec

_AT_ONCE = 4 << 20  # bytes of a file that is hashed before anything reads it
_TEST_STEPS = 5  # more than the taps of most convolutions
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Bundle:
    """A checked bundle with one onnxruntime session; makes any number of streams.

    Attributes:
        path: The bundle folder.
        manifest: The content of ``edgelin.json``.
        variant: Name of the variant that runs.
        threads: Threads of onnxruntime.
        in_place: Whether states are updated in their own buffers (see :func:`in_place_works`).
        session: The onnxruntime session.
    """

    def __init__(
        self, path: Path, *, variant: str | None = None, threads: int | None = None
    ) -> None:
        """Open a bundle; see :func:`edgelin.load`."""
        threads = default_threads() if threads is None else checks.thread_count(threads)
        self.path = path
        self.manifest = Manifest.read(path)
        graph = self.manifest.variant(variant)
        problem = version_problem(self.manifest)
        if problem:
            raise EdgelinError(f"{path} {problem}")
        self.manifest.check_files(path, variant, limit=_AT_ONCE)
        self.variant = variant or self.manifest.default_variant
        self.threads = threads
        with ThreadPoolExecutor(1, "edgelin-check") as helper:
            # Weights are hashed while onnxruntime packs them.
            checked = helper.submit(self.manifest.check_files, path, variant)
            try:
                # A packed matrix is a little larger than the file's: sums of blocks are beside it.
                with huge_pages(sum(record.bytes for record in graph.files.values()) * 5 // 4):
                    self.session = open_session(path / graph.file, self.threads)
            finally:
                checked.result()  # a file that is damaged is the reason for whatever else fails
        _check_metadata(self.session, self.manifest, path / graph.file)
        self.in_place = in_place_works(self.session, self.manifest)

    @cached_property
    def text(self) -> TextCodec:
        """The tokenizer of the bundle, read on first use.

        Raises:
            EdgelinError: The model reads features, or the file is damaged.
        """
        tokenizer = self.manifest.tokenizer
        if tokenizer is None:
            raise EdgelinError(f"{self.path} reads features, not text; give it --features")
        return TextCodec(self.path / tokenizer.file, self.manifest.output.size)

    def stream(self, batch: int = 1, *, capsule: str | None = None) -> Stream:
        """A new stream, ``batch`` independent rows wide.

        Args:
            batch: Rows.
            capsule: Name of the capsule in which every row begins; None takes the bundle's default
                one, if it has one, and ``"none"`` none: the stream begins before the first token.

        Raises:
            EdgelinError: There is no such capsule, or its file is damaged.
        """
        rows, saved = checks.positive("batch", batch), capsules.find(self, capsule)
        start = None if saved is None else Snapshot.of(saved, self.manifest).rows(rows)
        return Stream(self, rows, start)

    def add_capsule(
        self, name: str, stream: Stream, *, default: bool = False, dtype: str = "float32"
    ) -> str:
        """Add how a stream of one row stands to the files of the bundle.

        Args:
            name: Lower-case letters, digits, ``-`` and ``_``; a capsule of that name is replaced.
            stream: A stream of this bundle that has read something.
            default: Whether new streams begin there unless told otherwise.
            dtype: As of :meth:`Stream.save`.

        Returns:
            The capsule's file, relative to the bundle.

        Raises:
            EdgelinError: The name is not allowed, or the bundle cannot be written.
        """
        self.manifest = capsules.add(self, name, stream.saved(), default=default, dtype=dtype)
        return self.manifest.capsules[name].file

    def pool(self, slots: int) -> Pool:
        """An empty pool for so many streams; see :mod:`edgelin.runtimes.pool`.

        Raises:
            EdgelinError: A state of the model grows.
        """
        return Pool(self, checks.positive("slots", slots))


def default_threads() -> int:
    """Physical cores that this process may use (hyper-threads only fight for the same units)."""
    physical = psutil.cpu_count(logical=False) or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed, _container_cores() or physical))


def version_problem(manifest: Manifest) -> str | None:
    """Why the installed onnxruntime is too old for a bundle, or None."""
    installed = onnxruntime.__version__
    if _version(installed) >= _version(manifest.min_onnxruntime):
        return None
    return (
        f"needs onnxruntime >= {manifest.min_onnxruntime}, {installed} is installed: "
        f'pip install -U "onnxruntime>={manifest.min_onnxruntime}"'
    )


def open_session(
    graph: Path, threads: int, *, prepack: bool = True
) -> onnxruntime.InferenceSession:
    """An onnxruntime CPU session with the options that decode fastest.

    Args:
        graph: The ``.onnx`` file.
        threads: Of onnxruntime.
        prepack: Whether weights are copied into the order that kernels read fastest; those of
            rounded matrices compute in float without, and slowly.

    Raises:
        EdgelinError: onnxruntime refuses the graph.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors arrive as exceptions; the log would only repeat them
    # Workers spin within a call, which decode needs, but do not burn a core between calls.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Plans and pools of memory for every length of a call would be kept, and make no call faster.
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    # Rounded weights in standard operators become float ones at once, not again at every step.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise EdgelinError(
            f"onnxruntime {onnxruntime.__version__} cannot load {graph}: {one_line(error)}"
        ) from error


def in_place_works(session: onnxruntime.InferenceSession, manifest: Manifest) -> bool:
    """Whether each float32 state may be read and written in one buffer.

    No operator promises that, so a call of several steps and one of a single step are made from
    random states both ways; only if every bit agrees are the states updated in place, which saves a
    third to a half of the time of a recurrence. Which node reads a state last does not depend on
    the number of steps, so that few are enough.
    """
    apart, together = (_test_run(session, manifest, in_place=flag) for flag in (False, True))
    return apart == together


def _test_run(
    session: onnxruntime.InferenceSession, manifest: Manifest, *, in_place: bool
) -> list[bytes]:
    """Digests of the outputs and states of the calls of :func:`in_place_works`."""
    random = np.random.default_rng(0)
    buffers = Buffers(session, manifest, 1, in_place=in_place)
    for spec, array in zip(manifest.states, buffers.states, strict=True):
        if spec.dtype == "float32":
            array[...] = random.random(array.shape, np.float32)
    digests = []
    for time in (min(_TEST_STEPS, manifest.chunk), 1):
        outputs = buffers.run(manifest.input.random(random, 1, time))
        digests.append(sha256(outputs.data).digest())
    return [*digests, *(sha256(array.data).digest() for array in buffers.states)]


def one_line(error: BaseException) -> str:
    """The message of a foreign exception on one line, shortened."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _check_metadata(session: onnxruntime.InferenceSession, manifest: Manifest, graph: Path) -> None:
    """Refuse a graph that was exported with another contract than the manifest's."""
    stored: Any = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
    try:
        stored = json.loads(stored or "null")
    except ValueError:
        stored = None
    if stored != manifest.io_part():
        raise EdgelinError(
            f"{graph} does not carry the contract of edgelin.json in its metadata; "
            "the files are of different exports: export the bundle again"
        )


def _container_cores() -> int | None:
    """Whole cores of a container's CPU quota; more spinning threads would stall each other."""
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return None


def _version(text: str) -> tuple[int, ...]:
    """``"1.25.1"`` as numbers; what follows them, such as ``".dev2026"``, does not count."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()
