"""How one call of a kernel is measured: time, host time, memory, errors.

A step is a forward and its backward. GPU time is the sum of its kernels' times in a profile, wall
time what events around it read, launch gaps included; the L2 cache is flushed before each. Host
time is Python's for a step too short to keep a GPU busy.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch
from cases import ENDS, STATES, Call, Case, Inputs, Sizes
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], object]
_HOST_TIME = 64  # tokens


def steps_of(case: Case, who: str, sizes: Sizes, device: str = "cuda") -> tuple[Step, Step]:
    """Forward, and forward with backward, as in training: from a zero state that is not trained.

    The latter gives the output and the gradients.
    """
    inputs = case.inputs(who, sizes, device, states=who == "ours")
    wanted = [x.requires_grad_() for name, x in inputs.items() if name not in (*STATES, ENDS)]
    call, up = case.calls[who], torch.empty(0)

    def forward() -> Tensor:
        return call(inputs)[0]

    def step() -> object:
        nonlocal up
        o = forward()
        if not up.numel():
            up = torch.randn_like(o)
        return o.detach(), *torch.autograd.grad(o, wanted, up)

    return forward, step


def speed(case: Case, who: str, sizes: Sizes) -> dict[str, float]:
    """GPU and wall ms of a step, launches, MB it takes beside its inputs and MB it keeps."""
    forward, step = steps_of(case, who, sizes)
    for _ in range(3):
        step()
    gpu, launches = _gpu_ms(step)
    return {
        "gpu_ms": gpu,
        "wall_ms": _wall_ms(step),
        "launches": launches,
        "peak_mb": _megabytes(step, peak=True),
        "kept_mb": _megabytes(forward, peak=False),
    }


def host_ms(case: Case, who: str, bursts: int = 20, steps: int = 5) -> float:
    """ms of Python and launches for a step of 64 tokens: the median of bursts, which are shorter
    than the queue of launches, so that nobody waits for the GPU."""
    _, step = steps_of(case, who, Sizes(1, _HOST_TIME, case.heads, case.key, case.value))
    times = []
    for _ in range(bursts):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        times.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return statistics.median(times) / steps * 1e3


def first_call_s(case: Case, who: str, sizes: Sizes) -> float:
    """Seconds of the first step of a process: compiling, and for fla trying configurations."""
    _, step = steps_of(case, who, sizes)
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def errors(case: Case, who: str, sizes: Sizes, device: str = "cuda") -> dict[str, float | None]:
    """‖x - truth‖ / ‖truth‖ of o, the last states and the gradients of all inputs.

    The initial states and the gradients of the last ones are random. None: there is no such
    gradient. The truth is the sequential form in float64.
    """
    inputs = case.inputs(who, sizes, device, states=True, random=True)
    exact = {name: x.detach().double() for name, x in inputs.items()}
    truth = _results(case.reference, exact)
    found = _results(case.calls[who], inputs)
    return {name: _error(found[name], truth[name]) for name in truth}


def _results(call: Call, inputs: Inputs) -> Inputs:
    """o, the last states and all gradients, by name."""
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = call(inputs)
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    drawn = [torch.randn(y.shape, generator=generator, device=y.device) for y in outputs]
    ups = [up.bfloat16().to(y.dtype) for up, y in zip(drawn, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, list(inputs.values()), ups, allow_unused=True)
    states = [name for name in STATES if name in inputs]
    named = dict(zip(["o", *states], (y.detach() for y in outputs), strict=True))
    return named | {f"d{name}": g for name, g in zip(inputs, grads, strict=True)}


def _error(found: Tensor | None, truth: Tensor) -> float | None:
    if found is None:
        return None
    return float((found.double() - truth).norm() / truth.norm())


@functools.cache
def _l2() -> Tensor:
    """Larger than any L2 cache: writing it evicts everything else."""
    return torch.empty(1 << 28, dtype=torch.int8, device="cuda")


def _gpu_ms(step: Step, repeats: int = 5) -> tuple[float, int]:
    """Median sum of kernel times and the number of launches."""
    times, launches = [], 0
    for _ in range(repeats):
        _l2().zero_()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        events = seen.events() or []
        spans = [e.time_range.elapsed_us() for e in events if e.device_type == DeviceType.CUDA]
        times.append(sum(spans) / 1e3)
        launches = len(spans)
    return statistics.median(times), launches


def _wall_ms(step: Step, repeats: int = 20) -> float:
    """Median time between events around a step."""
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _l2().zero_()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _megabytes(run: Step, *, peak: bool) -> float:
    """MB that a run takes at its peak, or that are still taken while its result is held."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    after = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    del result
    return (after - before) / 1e6
