"""Compiles the kernels for a Hopper GPU, on any machine, and shows what the compiler made of them.

    python benchmarks/gpu/compile.py --only gla,kda

No GPU is needed: the launches of a forward and a backward of 8 x 4,096 tokens are recorded with
tensors that have no data, or with ``--shape packed`` those of sequences of 64 to 4,096 tokens. A
line is a kernel: registers a thread, bytes of the stack frame (where spilled registers go) and the
instructions that move them, shared memory a block, and how many instructions multiply matrices on
tensor cores (wgmma: by a warp group; mma: by a warp). Compiled kernels stay in Triton's cache, from
where another machine with the same Python and Triton can take them (README.md).

What counts is the Triton version of the training machine; another one is used by putting it first
on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from cases import CASES, Sizes
from kernels import sizes
from results import selected
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from edgelin.recurrences import delta, diagonal, dplr, linear, packed
from edgelin.recurrences.operator import Operator

OPERATORS = [linear._linear, linear.on_gpu.run_packed, linear.on_gpu.run_normalized, delta._delta,
             delta.on_gpu.run_packed, dplr._dplr, dplr.on_gpu.run_packed,
             diagonal._diagonal]  # fmt: skip
HOPPER = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BLOCKS = ("BX", "BY", "BT", "BK", "BV", "BN", "BD", "BLOCK", "S", "MODE")
COUNTS = {"wgmma": r"\bHGMMA\b", "mma": r"\bHMMA\b", "spills": r"\b(?:STL|LDL)\b"}


class Target:
    """Stands for the driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        """A Hopper GPU."""
        return HOPPER

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched."""
        return 0


class Address:
    """A tensor without data, as a launch sees it: a dtype and an aligned address."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Aligned."""
        return 0


def record(show: Callable[[JITFunction[Any], Any, float], None]) -> None:
    """From now on launches compile and show what they compiled; nothing runs."""
    seen: set[int] = set()
    run = JITFunction.run

    def compile_only(self: JITFunction[Any], *args: Any, **kwargs: Any) -> None:
        bare = [Address(x.dtype) if isinstance(x, torch.Tensor) else x for x in args]
        began = time.perf_counter()
        made = run(self, *bare, **{**kwargs, "warmup": True})
        if id(made) not in seen:
            seen.add(id(made))
            show(self, made, time.perf_counter() - began)

    for operator in OPERATORS:  # else a tensor without data only asks for shapes
        operator.op.register_fake(_both(operator))
    JITFunction.run = compile_only  # type: ignore[method-assign, assignment]
    stream = SimpleNamespace(cuda_stream=0)
    torch.cuda.current_stream = lambda device: stream  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign, assignment]
    torch.cuda._exchange_device = lambda index: 0  # type: ignore[assignment]
    torch.cuda._maybe_exchange_device = lambda index: 0  # type: ignore[assignment]
    driver.set_active(Target())  # type: ignore[arg-type]


def _both(operator: Operator) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What an operator launches forward and, as autograd would go on, backward."""

    def run(*inputs: Any) -> tuple[torch.Tensor, ...]:
        # whatever their strides were: a copy would need a GPU
        fresh = (torch.empty(x.shape, dtype=x.dtype, device=x.device)
                 if isinstance(x, torch.Tensor) else x for x in inputs)  # fmt: skip
        inputs = tuple(fresh)
        made = operator.run(*inputs)
        outputs: tuple[torch.Tensor, ...] = made[: len(operator.like)]
        ups = [torch.empty_like(y) for y in outputs]
        read = [made[i] for i in operator.reads]
        kept: list[Any] = [] if operator.allocate is None else [[*read, *made[-1]]]
        operator.run_backward(*inputs, *ups, *kept)
        return outputs

    return run


def launches(name: str, sizes: Sizes) -> None:
    """Forward and backward of a case, with tensors that have no data."""
    case = CASES[name]
    packed.ends_of = lambda *_: sizes.ends  # type: ignore[assignment]  # nobody can read them
    with FakeTensorMode(), torch.no_grad():
        made = case.inputs("ours", sizes, "cpu", states=True)
        case.calls["ours"]({n: torch.empty_like(x, device="cuda") for n, x in made.items()})


def facts_of(made: Any) -> dict[str, int]:
    """What the machine code says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("cuobjdump", "-sass", file.name)
    found = {k: int(v) for k, v in re.findall(r"(REG|STACK):(\d+)", usage)}
    counts = {k: len(re.findall(pattern, code)) for k, pattern in COUNTS.items()}
    return {"regs": found["REG"], "stack": found["STACK"], **counts, "shared": made.metadata.shared}


def _tool(name: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    """Compile the kernels of the chosen cases and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="", help="beginnings of names of cases, with commas")
    parser.add_argument("--shape", default="8x4096", help="rows x tokens, or packed")
    options = parser.parse_args()
    print(f"{'case':15}{'kernel':22}{'blocks':38}{'warps':>6}{'stages':>7}{'regs':>5}{'stack':>6}"
          f"{'spills':>7}{'shared':>7}{'wgmma':>6}{'mma':>5}{'s':>6}")  # fmt: skip

    def show(kernel: JITFunction[Any], made: Any, seconds: float) -> None:
        """A line of the table."""
        meta, facts = made.metadata, facts_of(made)
        constants = {kernel.arg_names[k[0]]: v for k, v in made.src.constants.items()}
        flags = [k for k, v in constants.items() if v is True]
        blocks = " ".join([f"{k}={v}" for k, v in constants.items() if k in BLOCKS] + flags)
        print(f"{name:15}{kernel.fn.__name__:22}{blocks:38}{meta.num_warps:6}{meta.num_stages:7}"
              f"{facts['regs']:5}{facts['stack']:6}{facts['spills']:7}{meta.shared:7}"
              f"{facts['wgmma']:6}{facts['mma']:5}{seconds:6.1f}", flush=True)  # fmt: skip

    record(show)
    for name in selected(options.only, [n for n, case in CASES.items() if "ours" in case.calls]):
        try:
            launches(name, sizes(name, options.shape))
        except RuntimeError as error:  # PyTorch without CUDA refuses some views
            print(f"{name:15}the rest was not recorded: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
