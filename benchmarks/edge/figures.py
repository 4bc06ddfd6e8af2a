"""The figures: each builds what it needs, measures both sides in turns and says what came out."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import peers
from bandwidth import Probe
from llama import Llama
from models import FAST, FLOAT, INT4, INT8, Store
from numpy.typing import NDArray
from rounds import median_ratio, median_time, paired, undisturbed

import edgelin
from edgelin.runtimes.huge_pages import huge_pages
from edgelin.runtimes.session import open_session
from edgelin.runtimes.stream import Stream

STREAMS = 8
LONG = 200_000


@dataclass
class Found:
    """What a figure found.

    Args:
        value: The number that the bar is for.
        rows: The rounds: a row each, a number a side.
        sides: What the numbers of a row are.
        details: Whatever else is worth keeping.
    """

    value: float
    rows: list[list[float]]
    sides: list[str]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a figure finds what it measures, and how it measures.

    Args:
        store: Checkpoints and bundles.
        llama: Source folder of llama.cpp, built; None: there is none.
        priority: As of :func:`rounds.undisturbed`.
    """

    store: Store
    llama: Path | None
    priority: int = 0

    def undisturbed(self) -> contextlib.AbstractContextManager[bool]:
        """Around everything that is timed, sessions included."""
        return undisturbed(self.priority)

    def peer(self) -> Llama:
        """llama.cpp.

        Raises:
            FileNotFoundError: It was not given, or is not built.
        """
        if self.llama is None:
            raise FileNotFoundError("this figure needs llama.cpp; give --llama and its folder")
        return Llama(self.llama, self.store.folder)


@dataclass(frozen=True)
class Figure:
    """One figure.

    Args:
        text: What the value is.
        bar: What it should reach.
        measure: Measures it.
        at_most: Whether the value should stay below the bar instead.
    """

    text: str
    bar: float
    measure: Callable[[Place], Found]
    at_most: bool = False

    def reached(self, value: float) -> bool:
        """Whether a value meets the bar, with the 5 % that a shared machine may take."""
        return value * 0.95 <= self.bar if self.at_most else value >= 0.95 * self.bar


def opened(place: Place, name: str, variant: str, threads: int, batch: int = 1) -> Stream:
    """A stream of a bundle."""
    bundle = edgelin.load(place.store.bundle(name), variant=variant, threads=threads)
    return bundle.stream(batch)


def stepper(stream: Stream, batch: int = 1) -> Callable[[], object]:
    """A function that reads one random token a row."""
    tokens = _tokens(stream, batch, 256)

    def steps() -> Iterator[object]:
        while True:
            for t in range(tokens.shape[1]):
                yield stream.feed(tokens[:, t : t + 1])

    endless = steps()
    return lambda: next(endless)


def _tokens(stream: Stream, batch: int, time: int) -> NDArray[np.int64]:
    """Random ids `[batch, time]`."""
    return stream.input.random(np.random.default_rng(0), batch, time)


def read_share(place: Place) -> Found:
    """Bytes that a float32 step reads and writes a second, over what memory can do."""
    path = place.store.graph("gla", FLOAT)
    with place.undisturbed():
        stream, probe = opened(place, "gla", FLOAT, 2), Probe(2)
        step = stepper(stream)
        touched = graphs.weight_bytes(path) + 2 * stream.state_bytes
        median_time(step, 3)
        rows = paired(
            [
                lambda: touched / median_time(step, 15) / 1e9,
                lambda: float(np.median([probe.gigabytes_per_s() for _ in range(7)])),
            ]
        )
    return Found(median_ratio(rows), rows, ["step, GB/s", "read probe, GB/s"], {"bytes": touched})


def beside_matrices(place: Place) -> Found:
    """Time of an int4 step over that of its MatMulNBits nodes alone."""
    path = place.store.graph("gla", FAST)
    alone = path.with_name("matrices.onnx")
    graphs.matrices_alone(path, alone)
    with place.undisturbed():
        step = stepper(opened(place, "gla", FAST, 2))
        with huge_pages(path.with_name(f"{path.name}_data").stat().st_size * 5 // 4):
            matrices = graphs.runner(open_session(alone, 2))
        median_time(step, 5), median_time(matrices, 5)
        rows = paired(
            [lambda: 1e3 * median_time(step, 60), lambda: 1e3 * median_time(matrices, 60)]
        )
    counts = graphs.node_counts(path)
    return Found(
        median_ratio(rows),
        rows,
        ["step, ms", "matrices alone, ms"],
        {"nodes": sum(counts.values())},
    )


def decode_beside_llama(bits: int, threads: int) -> Callable[[Place], Found]:
    """Tokens a second of steps, over those of llama.cpp with a model of the same sizes."""

    def speed(stream: Stream) -> Callable[[], float]:
        step = stepper(stream)
        median_time(step, 5)
        return lambda: 1 / median_time(step, 64)

    def measure(place: Place) -> Found:
        peer = place.peer()
        peer.model(bits)
        place.store.bundle("gated-delta")
        with place.undisturbed():
            ours = [speed(opened(place, "gated-delta", name, threads)) for name in _OURS[bits]]
            peers = [lambda: peer.tokens_per_s(bits, threads, steps=64)]
            rows = paired([*ours[:1], *peers, *ours[1:]])
        return Found(median_ratio(rows), rows, _sides(bits), {"llama.cpp": peer.version()})

    return measure


def prefill_beside_llama(bits: int) -> Callable[[Place], Found]:
    """Tokens a second of a prompt of 512, over those of llama.cpp."""

    def speed(stream: Stream) -> Callable[[], float]:
        prompt = _tokens(stream, 1, 512)
        stream.feed(prompt[:, :64])
        return lambda: 512 / median_time(lambda: stream.feed(prompt), 1)

    def measure(place: Place) -> Found:
        peer = place.peer()
        peer.model(bits)
        place.store.bundle("gated-delta")
        with place.undisturbed():
            ours = [speed(opened(place, "gated-delta", name, 2)) for name in _OURS[bits]]
            peers = [lambda: peer.tokens_per_s(bits, 2, prompt=512)]
            rows = paired([*ours[:1], *peers, *ours[1:]], rounds=3)
        return Found(median_ratio(rows), rows, _sides(bits), {"llama.cpp": peer.version()})

    return measure


def small_model(place: Place) -> Found:
    """Tokens a second of the 5M model at int4."""
    path = place.store.graph("small", FAST)
    with place.undisturbed():
        step = stepper(opened(place, "small", FAST, 2))
        median_time(step, 100)
        rows = paired([lambda: 1 / median_time(step, 2000)])
    return Found(float(np.median(rows)), rows, ["tokens/s"], _nodes(path))


def small_beside_eager(place: Place) -> Found:
    """The 5M model at int4 over the same model in PyTorch, step by step."""
    place.store.bundle("small")
    with place.undisturbed():
        step = stepper(opened(place, "small", FAST, 2))
        eager = peers.eager("small", threads=2)
        median_time(step, 100), median_time(eager, 20)
        rows = paired([lambda: 1 / median_time(step, 1000), lambda: 1 / median_time(eager, 100)])
    return Found(median_ratio(rows), rows, _SPEEDS)


def beside_generate(name: str) -> Callable[[Place], Found]:
    """Decoding at int4 over ``generate()`` of transformers."""

    def measure(place: Place) -> Found:
        place.store.bundle(name)
        with place.undisturbed():
            step = stepper(opened(place, name, FAST, 2))
            generate = peers.generate(name, threads=2)
            median_time(step, 5)
            rows = paired([lambda: 1 / median_time(step, 32), lambda: generate(6)])
        return Found(median_ratio(rows), rows, _SPEEDS, peers.versions())

    return measure


def batched(variant: str) -> Callable[[Place], Found]:
    """Tokens a second of 8 streams in one call over 8 streams in turn."""

    def measure(place: Place) -> Found:
        path = place.store.bundle("gated-delta")
        with place.undisturbed():
            bundle = edgelin.load(path, variant=variant, threads=2)
            together = stepper(bundle.stream(STREAMS), STREAMS)
            each = [stepper(bundle.stream()) for _ in range(STREAMS)]

            def in_turn() -> None:
                for step in each:
                    step()

            median_time(together, 3), median_time(in_turn, 2)
            rows = paired(
                [
                    lambda: STREAMS / median_time(together, 20),
                    lambda: STREAMS / median_time(in_turn, 5),
                ]
            )
        return Found(median_ratio(rows), rows, ["batched, tokens/s", "in turn, tokens/s"])

    return measure


@functools.cache
def loading(place: Place) -> list[dict[str, float]]:
    """What a fresh process takes to load the int4 bundle and make steps, five times."""
    bundle = place.store.bundle("gla")
    with place.undisturbed():
        return [fresh(bundle) for _ in range(5)]


def fresh(bundle: Path, *steps: int) -> dict[str, float]:
    """What ``fresh.py`` prints."""
    program = Path(__file__).with_name("fresh.py")
    command = [sys.executable, str(program), str(bundle), FAST, *map(str, steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def load_time(place: Place) -> Found:
    """Seconds from a started interpreter to a bundle that is ready."""
    rows = [[run["load_s"]] for run in loading(place)]
    return Found(float(np.median(rows)), rows, ["load, s"])


def memory_over_weights(place: Place) -> Found:
    """MB that a process takes at its peak beside the weights, steps and chunks included."""
    path = place.store.graph("gla", FAST)
    weights = graphs.weight_bytes(path)
    rows = [[(run["peak_bytes"] - weights) / 1e6] for run in loading(place)]
    return Found(float(np.median(rows)), rows, ["MB over weights"], {"weight bytes": weights})


@functools.cache
def growth(place: Place) -> dict[str, float]:
    """What 200,000 steps change, in a fresh process."""
    bundle = place.store.bundle("small")
    with place.undisturbed():
        return fresh(bundle, LONG)


def memory_growth(place: Place) -> Found:
    """MB that a process grows by over 200,000 steps."""
    found = growth(place)
    return Found(found["growth_bytes"] / 1e6, [], ["MB"], found)


def time_growth(place: Place) -> Found:
    """Time of a step after 200,000 over one of a stream that has just begun, in turns."""
    found = growth(place)
    return Found(found["late_over_early"], [], ["ratio"], found)


def _nodes(path: Path) -> dict[str, Any]:
    """The nodes of a graph, as details."""
    counts = graphs.node_counts(path)
    return {"nodes": sum(counts.values()), "by operator": dict(counts.most_common())}


def _sides(bits: int) -> list[str]:
    """Names of the sides of a comparison with llama.cpp: its place is the second."""
    ours = [f"ours, {name}, tokens/s" for name in _OURS[bits]]
    return [*ours[:1], "llama.cpp, tokens/s", *ours[1:]]


_OURS = {4: (FAST, INT4), 8: (INT8,)}  # the first is compared
_SPEEDS = ["ours, tokens/s", "peer, tokens/s"]
FIGURES: dict[str, Figure] = {
    "fp32-decode": Figure("share of the read ceiling, 350M GLA", 0.65, read_share),
    "int4-step": Figure("int4 step over its matrices alone", 1.15, beside_matrices, at_most=True),
    "int4-llama-2": Figure(
        "int4 decode over llama.cpp Q4_0, 2 threads", 1.25, decode_beside_llama(4, 2)
    ),
    "int4-llama-1": Figure(
        "int4 decode over llama.cpp Q4_0, 1 thread", 1.10, decode_beside_llama(4, 1)
    ),
    "int8-llama-2": Figure(
        "int8 decode over llama.cpp Q8_0, 2 threads", 1.10, decode_beside_llama(8, 2)
    ),
    "int8-llama-1": Figure(
        "int8 decode over llama.cpp Q8_0, 1 thread", 1.05, decode_beside_llama(8, 1)
    ),
    "int4-prefill": Figure("512 tokens, int4 over llama.cpp Q4_0", 1.05, prefill_beside_llama(4)),
    "int8-prefill": Figure("512 tokens, int8 over llama.cpp Q8_0", 1.5, prefill_beside_llama(8)),
    "small": Figure("5M at int4, tokens/s", 2500, small_model),
    "small-eager": Figure("5M at int4 over eager PyTorch", 8, small_beside_eager),
    "mamba2": Figure("Mamba-2 at int4 over transformers", 10, beside_generate("mamba2")),
    "qwen3.5": Figure("Qwen3.5-like at int4 over transformers", 10, beside_generate("qwen3.5")),
    "streams-int4": Figure("8 streams batched over in turn, int4", 1.9, batched(FAST)),
    "streams-int8": Figure("8 streams batched over in turn, int8", 2.5, batched(INT8)),
    "load": Figure("load time of 350M int4, s", 0.7, load_time, at_most=True),
    "memory": Figure("peak memory over weights, MB", 140, memory_over_weights, at_most=True),
    "long-memory": Figure("growth over 200,000 steps, MB", 2, memory_growth, at_most=True),
    "long-time": Figure("step after 200,000 over step 100", 1.05, time_growth, at_most=True),
}
