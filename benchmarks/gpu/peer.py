"""flash-linear-attention (fla) as the peer: its tuning made short, and its kernels compiled ahead.

In one process fla's first call takes minutes: every kernel is compiled in up to a hundred
configurations, one after the other, and each is timed for a tenth of a second. Here all processors
compile first, into the compiler's cache on disk; then every configuration is timed, alone on the
GPU, by a run to warm up and four more. All are tried, for both shapes anew (but see `like`), which
is more than fla's own users get: there the first shape of a process decides. What won is written to
a file, so that later runs compile only that. A shape can be told to try only what won in another
one.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from edgelin.files import replacing

Choices = dict[str, dict[str, list[Any]]]  # label, kernel, [key, configuration] of each key


def is_installed() -> bool:
    """Whether fla can be imported; says so where it can't."""
    found = importlib.util.find_spec("fla") is not None
    if not found:
        print("fla is not installed: its rows are left out")
    return found


def allow() -> None:
    """Let fla run gated backwards on Hopper before Triton 3.7.1: they agree with float64 there."""
    guarded: Any = importlib.import_module("fla.ops.common.chunk_o")
    guarded.TRITON_ABOVE_3_7_1 = True


def prepare() -> None:
    """Make fla run, and tune in short; before its first call."""
    os.environ["FLA_CACHE_RESULTS"] = "0"  # else choices of one shape serve others
    allow()
    _autotuner().do_bench = property(lambda self: _short_bench)


def read_choices(path: Path) -> Choices:
    """What won in earlier runs."""
    found: Choices = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


@contextlib.contextmanager
def tuned(path: Path, label: str, like: str = "") -> Iterator[None]:
    """Tune what is called inside for itself, or as an earlier run did under this label.

    ``like`` is another label: only what won there is tried.
    """
    choices = read_choices(path)
    every = {tuner: tuner.configs for tuner in _tuners()}
    for tuner in every:
        tuner.cache.clear()
        for key, wanted in choices.get(label, {}).get(_name(tuner), []):
            for config in tuner.configs:
                if config.all_kwargs() == wanted:
                    tuner.cache[tuple(key)] = config
        tuner.configs = _tried(tuner, tuner.configs, choices, like)
    yield
    for tuner, configs in every.items():
        tuner.configs = configs
    choices[label] = {
        _name(tuner): [[list(key), config.all_kwargs()] for key, config in tuner.cache.items()]
        for tuner in _tuners()
        if tuner.cache
    }
    with replacing(path) as part:
        part.write_text(json.dumps(choices, default=str, indent=1) + "\n", encoding="utf-8")


def _tried(tuner: Any, configs: list[Any], choices: Choices, like: str) -> list[Any]:
    """Configurations to try: all, or what won under another label, or two where nothing did."""
    if not like:
        return configs
    won = [wanted for _, wanted in choices.get(like, {}).get(_name(tuner), [])]
    return [config for config in configs if config.all_kwargs() in won] or configs[:2]


def compile_ahead(
    run: Callable[[Any], object], jobs: Sequence[tuple[str, str, Any]], path: Path, workers: int
) -> None:
    """Compile what the jobs need on all processors.

    Args:
        run: A function of a module: calls what a job calls, ``run(job)``.
        jobs: Label, the label whose choices are tried or "", and job.
        path: Where the choices of earlier runs are.
        workers: Processes.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_compile_share, args=(run, jobs, path, i, workers))
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _compile_share(
    run: Callable[[Any], object],
    jobs: Sequence[tuple[str, str, Any]],
    path: Path,
    index: int,
    workers: int,
) -> None:
    """Go through all jobs, compiling this process's configurations and launching none."""
    prepare()
    choices = read_choices(path)
    label = like = ""

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        won = [config for _, config in choices.get(label, {}).get(_name(self), [])]
        configs = self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs
        for config in _tried(self, configs, choices, like):
            values = config.all_kwargs()
            mine = zlib.crc32(f"{_name(self)} {values}".encode()) % workers == index
            if mine and (not won or values in won):
                with contextlib.suppress(Exception):  # too large a tile: tuning leaves it out
                    self.fn.run(*args, **{**kwargs, **values, "warmup": True})

    _autotuner().run = compile_only
    for label, like, job in jobs:  # noqa: B007  # compile_only reads them
        with contextlib.suppress(Exception):  # measuring will say what is wrong
            run(job)
        torch.cuda.empty_cache()


def _autotuner() -> Any:
    """Triton's class; not imported above, since CPU machines run without Triton."""
    return importlib.import_module("triton.runtime.autotuner").Autotuner


def _tuners() -> list[Any]:
    """All of fla's kernels that were imported and are tuned."""
    kind = _autotuner()
    return [x for x in gc.get_objects() if issubclass(type(x), kind) and _name(x)[:4] == "fla."]


def _name(tuner: Any) -> str:
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__name__}"


def _short_bench(call: Callable[[], object], quantiles: object = None) -> list[float]:
    """Median, least and most ms of four runs."""
    call()
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return [statistics.median(times), min(times), max(times)]
