"""Every mixer on a CUDA GPU: values against its float64 loop, gradients against the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import CASES, LOOPS
from loops.common import EPS, HIDDEN, LAYER
from loops.shared_block import embedding_of
from torch import Tensor

from edgelin import mixers

pytestmark = pytest.mark.gpu

TIME = 130
PAST = 9  # tokens in a cache that grows


def build(case: str) -> Any:
    """A mixer with reproducible weights."""
    torch.manual_seed(7)
    return mixers.build(CASES[case], HIDDEN, LAYER, EPS, where="model.mixers.m")


def arguments(mixer: Any, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Input and states that are not zero."""
    states = {s.name: (3, *s.sized(PAST)) for s in mixer.state_specs()}
    shapes = {"x": (3, TIME, HIDDEN), **states}
    found = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(seed)
        values = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        values = values.abs() + 1 if name.startswith("normalizer") else values
        found[name] = values.to(device, dtype).requires_grad_()
    return found


def shared_with(mixer: Any, x: Tensor) -> tuple[dict[str, Tensor], ...]:
    """What a mixer that reads more than the stream is given."""
    return ({"embedding": embedding_of(x)},) if getattr(mixer, "shares", False) else ()


def run(mixer: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """Output and states, in order."""
    states = {s.name: given[s.name] for s in mixer.state_specs()}
    position = torch.tensor([0, 3, 1_000_000], device=given["x"].device)
    y, after = mixer(given["x"], states, position, *shared_with(mixer, given["x"]))
    return [y, *(after[s.name] for s in mixer.state_specs())]


def gradients(mixer: Any, given: dict[str, Tensor], results: list[Tensor]) -> dict[str, Tensor]:
    """Of a weighted sum of all results, for inputs, states and parameters."""
    weighted = []
    for seed, result in enumerate(results):
        generator = torch.Generator().manual_seed(100 + seed)
        weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
        weighted.append((result.double() * weights.to(result.device)).sum())
    leaves = {**given, **dict(mixer.named_parameters())}
    grads = torch.autograd.grad(torch.stack(weighted).sum(), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


def near(got: Tensor, wanted: Tensor, tolerance: float, name: str) -> None:
    """Largest difference, relative to the largest entry."""
    got, wanted = got.detach().double().cpu(), wanted.detach().double().cpu()
    assert got.isfinite().all(), name
    error = float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
    assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_gpu_computes_the_loop_and_its_gradients(case: str, kind: str) -> None:
    mixer = build(case).double()
    given = arguments(mixer, torch.float64, "cpu")
    names = [spec.name for spec in mixer.state_specs()]
    arrays = {name: given[name].detach().numpy() for name in names}
    loop = LOOPS[CASES[case]["type"]].loop
    y, after = loop(mixer, given["x"].detach().numpy(), arrays, torch.tensor([0, 3, 10**6]).numpy())
    wanted = [torch.from_numpy(array) for array in (y, *(after[name] for name in names))]
    slopes = gradients(mixer, given, run(mixer, given))

    mixer = build(case).cuda()
    given = arguments(mixer, torch.float32, "cuda")
    low = kind == "bfloat16"
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.autocast("cuda", torch.bfloat16, enabled=low):
        results = run(mixer, given)
    for name, got, value in zip(["y", *names], results, wanted, strict=True):
        near(got, value, 5e-2 if low else 1e-4, name)
    for name, slope in gradients(mixer, given, results).items():
        # A rate's gradient is a small difference of large sums: bfloat16 leaves its size and sign.
        # A feature that bfloat16 takes across zero has another slope.
        rough = 0.5 if slopes[name].numel() <= HIDDEN else 2e-1 if "relu" in case else 1e-1
        near(slope, slopes[name], rough if low else 5e-4, f"gradient of {name}")
