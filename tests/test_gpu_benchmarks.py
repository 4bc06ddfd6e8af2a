"""The GPU benchmarks, as far as a machine without a GPU can say: cases, resuming, report."""

from __future__ import annotations

import importlib
import json
import math
import sys
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"
NAMES = ("cases", "measure", "peer", "results", "kernels", "model", "report")


@pytest.fixture(scope="module")
def gpu() -> Any:
    """The modules of the folder, which import each other by their bare names."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)


CASES = [
    "linear-128", "linear-64", "retention-128", "retention-64", "scalar-128", "scalar-64",
    "normalized-128", "ssd", "gla-128", "gla-64", "scalar-128x256", "gla-128x256", "delta-128",
    "gated-delta-128", "kda-128", "rwkv7-64", "diagonal", "softmax-128", "softmax-64",
]  # fmt: skip


def tiny(gpu: Any, name: str) -> Any:
    """Few and narrow heads; K != V where the case says so; as many channels as it has axes."""
    case = gpu.cases.CASES[name]
    key = 1 if case.channels else 16
    value = 12 if case.channels else 8 if case.value < case.key else 16
    return gpu.cases.Sizes(2, 65, 1 if case.channels else 2, key, value)


def test_all_cases_are_tested(gpu: Any) -> None:
    assert list(gpu.cases.CASES) == CASES


@pytest.mark.parametrize("name", CASES)
def test_our_call_agrees_with_float64(gpu: Any, name: str) -> None:
    """Outputs, last states and every gradient of the call that is timed, in bfloat16."""
    case = gpu.cases.CASES[name]
    who = next(iter(case.calls))
    errors = gpu.measure.errors(case, who, tiny(gpu, name), "cpu")
    states = [] if who == "sdpa" else ["state", "normalizer"] if case.normalized else ["state"]
    assert set(errors) >= {"o", *states, *(f"d{state}" for state in states)}
    assert all(0 < error < 0.02 for error in errors.values()), errors


@pytest.mark.parametrize("name", CASES)
def test_step_has_the_output_and_a_gradient_of_every_input(gpu: Any, name: str) -> None:
    case = gpu.cases.CASES[name]
    who = next(iter(case.calls))
    _, step = gpu.measure.steps_of(case, who, tiny(gpu, name), "cpu")
    o, *grads = step()
    inputs, given = (
        case.inputs(who, tiny(gpu, name), "cpu", states=states) for states in (False, who == "ours")
    )
    assert torch.equal(o, case.calls[who](given)[0])
    assert [grad.shape for grad in grads] == [x.shape for x in inputs.values()]
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("softmax")])
def test_peer_gets_the_same_numbers(gpu: Any, name: str) -> None:
    """Only a decay a key differs in its dtype, not in its values."""
    case = gpu.cases.CASES[name]
    ours, theirs = (
        case.inputs(who, tiny(gpu, name), "cpu", states=True, random=True)
        for who in ("ours", "fla")
    )
    assert list(ours) == list(theirs)
    for key, x in ours.items():
        assert torch.equal(x, theirs[key].to(x.dtype)), key
        assert key in ("g", "state", "normalizer") or x.dtype == torch.bfloat16


def packed_inputs(gpu: Any, name: str, who: str, *, states: bool) -> Any:
    """Those of a small call of the shape "packed"."""
    sizes = gpu.kernels.sizes(name, "packed")
    ends = gpu.cases.packed_ends(100, 3, 40)
    sizes = replace(sizes, time=100, heads=2, key=16, value=16, ends=ends)
    case = gpu.cases.CASES[name]
    return sizes, case.inputs(who, sizes, "cpu", states=states, random=True)


@pytest.mark.parametrize("name", ["linear-128", "gla-128", "gated-delta-128"])
def test_packed_call_is_every_sequence_alone(gpu: Any, name: str) -> None:
    sizes, inputs = packed_inputs(gpu, name, "ours", states=True)
    case, ends = gpu.cases.CASES[name], sizes.ends
    assert len(ends) > 3 and inputs["state"].shape[0] == len(ends) - 1
    inputs = {n: x if n == "cu_seqlens" else x.double() for n, x in inputs.items()}
    o, states = case.calls["ours"](inputs)
    del inputs["cu_seqlens"]
    for n, (begin, end) in enumerate(pairwise(ends)):
        one = {name: x[:, begin:end] for name, x in inputs.items() if name != "state"}
        y, after = case.reference({**one, "state": inputs["state"][n : n + 1]})
        torch.testing.assert_close(o[:, begin:end], y)
        torch.testing.assert_close(states[n : n + 1], after)


def test_packed_shape(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """32,768 tokens, the same lengths at every call; fla is given them, and warmed up with few."""
    ends = gpu.kernels.sizes("gla-128", "packed").ends
    lengths = [end - begin for begin, end in pairwise(ends)]
    assert ends == gpu.kernels.sizes("gated-delta-128", "packed").ends and ends[-1] == 32768
    assert 10 < len(lengths) < 30 and max(lengths) <= 4096 and min(lengths[:-1]) >= 64
    seen: list[Any] = []
    monkeypatch.setattr(
        gpu.measure, "steps_of", lambda case, who, sizes: (None, lambda: seen.append(sizes))
    )
    gpu.kernels.warm_up(("gla-128", "packed", "fla"))
    gpu.kernels.warm_up(("gla-128", "8x4096", "fla"))
    assert [x.ends[-1:] for x in seen] == [(4096,), ()] and len(seen[0].ends) > 2
    sizes, inputs = packed_inputs(gpu, "gla-128", "fla", states=False)
    given: dict[str, Any] = {}
    module = types.SimpleNamespace(chunk_gla=lambda **x: given.update(x) or (x["v"], None))
    monkeypatch.setitem(sys.modules, "fla.ops.gla", module)
    gpu.cases.CASES["gla-128"].calls["fla"](inputs)
    assert given["cu_seqlens"].tolist() == list(sizes.ends)


@pytest.mark.parametrize("name", ["linear-128", "gated-delta-128"])
def test_packed_step_has_gradients(gpu: Any, name: str) -> None:
    sizes, inputs = packed_inputs(gpu, name, "ours", states=False)
    _, step = gpu.measure.steps_of(gpu.cases.CASES[name], "ours", sizes, "cpu")
    o, *grads = step()
    assert len(grads) == len(inputs) - 1  # there is none of cu_seqlens
    assert all(x.isfinite().all() and x.any() for x in (o, *grads))


@pytest.mark.parametrize("name", ["gla", "scalar", "mamba2", "gated_deltanet", "softmax"])
def test_model_trains_in_bfloat16(gpu: Any, name: str) -> None:
    model = gpu.model.build(name, 65, layers=1, width=256).bfloat16()
    tokens = torch.randint(32000, (1, 66), generator=torch.Generator().manual_seed(0))
    loss = gpu.model.loss_of(model, tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert abs(loss.item() - math.log(32000)) < 0.5  # it has seen nothing yet
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["gla", "scalar", "softmax"])
def test_models_have_134_million_parameters(gpu: Any, name: str) -> None:
    model = gpu.model.build(name, 64, layers=1)
    numbers = (sum(p.numel() for p in part.parameters()) for part in (model, model.blocks[0]))
    whole, block = numbers
    assert round((whole + 11 * block) / 1e6) == 134


def test_softmax_peer_rotates_by_position(gpu: Any) -> None:
    """Pairs (i, i + D/2) as complex numbers, turned by exp(i t theta)."""
    mixer = gpu.model.Softmax(256, 2, 40).double()
    x = torch.randn(1, 33, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = mixer.qkv_proj(x)[0].unflatten(-1, (3, 2, 128)).unbind(1)
    theta = 10000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
    turn = torch.polar(torch.ones(33, 1, 64).double(), torch.arange(33)[:, None, None] * theta)
    q, k = (torch.complex(*part.chunk(2, dim=-1)) * turn for part in (q, k))
    scores = torch.einsum("thd,shd->hts", q, k.conj()).real / 128**0.5
    weights = scores.masked_fill(torch.ones(33, 33, dtype=torch.bool).triu(1), -torch.inf)
    o = torch.einsum("hts,shd->thd", weights.softmax(-1), v).flatten(1)
    found, _ = mixer(x, {}, torch.zeros(1, dtype=torch.int64))
    assert torch.allclose(found[0], mixer.out_proj(o), atol=1e-5)  # the angles are float32


def measured(job: tuple[str, ...]) -> dict[str, Any]:
    """Numbers as a run would give: fla takes 2.5 times as long, softmax T / 2,048 times."""
    _, shape, who = job
    if shape == "cold":
        return {"first_s": 4.0}
    if shape == "1x300":
        return {"errors": {"o": 2e-3, "dq": 3e-3}, "host_ms": 0.2 if who == "ours" else 1.0}
    length = 0 if shape == "packed" else int(shape.split("x")[1])
    factor = {"ours": 1.0, "fla": 2.5, "sdpa": length / 2048}[who]
    factor *= 1.5 if shape == "packed" else 1
    times = {"gpu_ms": 0.7 * factor, "wall_ms": 0.9 * factor, "launches": 5, "peak_mb": 700.0}
    return {**times, "kept_mb": 128.0}


def test_what_is_there_is_left_out(gpu: Any, tmp_path: Path) -> None:
    out, keys = tmp_path / "results.jsonl", gpu.kernels.KEYS
    wanted = gpu.kernels.jobs("gla,ssd", ["ours", "fla"], [*gpu.kernels.SHAPES, gpu.kernels.PACKED])
    assert len(wanted) == (3 * 3 + 1) * 2 + 3  # ssd, gla-128 (packed too), gla-64; ours gla-128x256
    done: list[tuple[str, ...]] = []

    def run(job: tuple[str, ...]) -> dict[str, Any]:
        done.append(job)
        if job == ("gla-64", "1x300", "fla"):
            raise ValueError("does not\nrun")
        return measured(job)

    gpu.results.work(wanted[:5], keys, run, out, math.inf)
    lines = gpu.results.read(out)
    assert [tuple(line[key] for key in keys) for line in lines] == wanted[:5] == done
    left = gpu.results.missing(wanted, keys, lines, again=False)
    assert left == wanted[5:]
    gpu.results.work(left, keys, run, out, -math.inf)  # no time left
    assert gpu.results.read(out) == lines
    gpu.results.work(left, keys, run, out, math.inf)
    lines = gpu.results.read(out)
    assert done == wanted and len(lines) == len(wanted)
    assert [line["failed"] for line in lines if "failed" in line] == ["ValueError: does not"]
    assert gpu.results.missing(wanted, keys, lines, again=False) == []
    assert gpu.results.missing(wanted, keys, lines, again=True) == [("gla-64", "1x300", "fla")]


def test_sweep_adds_lengths_of_the_same_tokens(gpu: Any) -> None:
    jobs = gpu.kernels.jobs("linear-64", ["ours"], [*gpu.kernels.SHAPES, *gpu.kernels.SWEEP])
    sizes = [gpu.kernels.sizes(name, shape) for name, shape, _ in jobs if shape != "1x300"]
    assert {size.batch * size.time for size in sizes} == {32768}
    assert {size.heads * size.value for size in sizes} == {2048}
    assert len(jobs) == 7


def test_report_renders(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results.jsonl"
    jobs = gpu.kernels.jobs(
        "", ["ours", "fla", "sdpa"], [*gpu.kernels.SHAPES, *gpu.kernels.SWEEP, gpu.kernels.PACKED]
    )
    jobs += gpu.kernels.first_calls("", ["ours"])
    lines = [dict(zip(gpu.kernels.KEYS, job, strict=True)) | measured(job) for job in jobs]
    lines.append({"case": "gla-128", "shape": "8x4096", "who": "ours", "failed": "later"})
    model = {"model": "gla", "shape": "16x2048", "weights": "bfloat16", "peak_gb": 10.0}
    lines.append({**model, "mode": "eager", "tokens_s": 590e3})
    lines.append({**model, "mode": "graph", "tokens_s": 612e3})
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    text = rendered(gpu, out, monkeypatch)
    assert "| gla-128 | 8x4096, gpu | 0.70 | 1.75 | 2.50 | 2.00 | yes |" in text
    assert "| linear-64 | 1x32768, wall | 0.90 | 2.25 | 2.50 | 0.55 | **no** |" in text
    assert "| gla-128, gpu | 1.05 | 2.62 | 2.50 | 1.50 |" in text
    assert "| gated-delta-128, wall | 1.35 | 3.38 | 2.50 | 1.50 |" in text
    assert "| gla-128 | 5 / 5 | 0.20 / 1.00 | 4.0 / - | 700 / 700 |" in text
    assert "yes, yes, **no**, yes" in text  # as much memory as fla is too much
    assert "| gla | 16x2048 | bfloat16 | 590 | 612 | - | 600 | yes | 10.0 |" in text
    assert "| gla-128 | 2,048 | 5,120 | 16.0 at 32,768 |" in text


def rendered(gpu: Any, out: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tables of a file, written beside a picture."""
    name = out.with_name("gpu")
    monkeypatch.setattr(sys, "argv", ["report.py", str(out), "--out", str(name)])
    gpu.report.main()
    assert name.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return name.with_suffix(".md").read_text(encoding="utf-8")


def test_report_of_little(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a peer, and without anything."""
    out = tmp_path / "results.jsonl"
    job = ("ssd", "8x4096", "ours")
    line = dict(zip(gpu.kernels.KEYS, job, strict=True))
    out.write_text(json.dumps(line | {"failed": "it"}) + "\n", encoding="utf-8")
    assert "ssd" not in rendered(gpu, out, monkeypatch)
    out.write_text(json.dumps(line | measured(job)) + "\n", encoding="utf-8")
    text = rendered(gpu, out, monkeypatch)
    assert "| ssd | 8x4096, gpu | 0.70 | - | - | 0.80 | yes |" in text
    assert "| ssd | 5 / - | - / - | - / - | 700 / - | - (-) | -, -, -, - |" in text


def test_crossing_of_lines_in_logarithms(gpu: Any) -> None:
    flat = {1024: 1.0, 2048: 1.0, 4096: 1.0}
    assert gpu.report.crossing(flat, {1024: 0.5, 2048: 0.707107, 4096: 1.414214}) == "2,896"
    assert gpu.report.crossing(flat, {1024: 2.0, 2048: 4.0}) == "< 1,024"
    assert gpu.report.crossing(flat, {1024: 0.1, 2048: 0.2}) == "> 2,048"
    assert gpu.report.crossing({}, flat) == "-"


class Kernel:
    """What a Triton kernel is to the autotuner; keeps the configurations that it ran with."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []
        self.fn = lambda: None
        self.fn.__module__, self.fn.__name__ = "fla.ops.made_up", "kernel"

    def run(self, *args: Any, warmup: bool, **kwargs: Any) -> None:
        """Launch, or only compile."""
        self.seen.append((kwargs["BT"], warmup))


@pytest.fixture
def tuner(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel with 12 configurations, of which BT = 5 is the fastest by its time of |BT - 5|."""
    autotuner = importlib.import_module("triton.runtime.autotuner")
    kernel = Kernel()

    def bench(call: Any, quantiles: Any) -> list[float]:
        call()
        return [abs(kernel.seen[-1][0] - 5)]

    monkeypatch.setattr(autotuner.Autotuner, "do_bench", property(lambda self: bench))
    monkeypatch.setattr(autotuner.Autotuner, "run", autotuner.Autotuner.run)  # put back at the end
    monkeypatch.setattr(gpu.peer, "prepare", lambda: None)
    configs = [autotuner.Config({"BT": size}) for size in range(12)]
    return autotuner.Autotuner(kernel, ["x", "H"], configs, ["H"], None, None)


def test_choices_of_the_peer_are_kept(gpu: Any, tuner: Any, tmp_path: Path) -> None:
    path, kernel = tmp_path / "tuned.json", tuner.fn
    with gpu.peer.tuned(path, "a"):
        tuner.run(1, H=4, warmup=False)
    assert len(kernel.seen) == 13 and kernel.seen[-1] == (5, False)
    kernel.seen.clear()
    with gpu.peer.tuned(path, "a"):
        tuner.run(1, H=4, warmup=False)
    assert kernel.seen == [(5, False)]  # nothing was tried again
    with gpu.peer.tuned(path, "b"):
        tuner.run(1, H=4, warmup=False)
    assert len(kernel.seen) == 14  # another shape is tuned for itself
    kernel.seen.clear()
    with gpu.peer.tuned(path, "c", like="b"):
        tuner.run(1, H=4, warmup=False)
    assert kernel.seen == [(5, False)]  # only what won there
    assert len(tuner.configs) == 12
    assert list(gpu.peer.read_choices(path)) == ["a", "b", "c"]


def test_processes_share_what_is_compiled(gpu: Any, tuner: Any, tmp_path: Path) -> None:
    path, kernel = tmp_path / "tuned.json", tuner.fn
    run = lambda job: tuner.run(1, H=job, warmup=False)  # noqa: E731
    shares = []
    for index in range(3):
        gpu.peer._compile_share(run, [("a", "", 4), ("b", "", 4)], path, index, 3)
        shares.append({size for size, warmup in kernel.seen if warmup})
        assert all(warmup for _, warmup in kernel.seen)  # compiled, never launched
        kernel.seen.clear()
    assert sorted(size for share in shares for size in share) == list(range(12))
    path.write_text(
        json.dumps({"a": {"fla.ops.made_up.kernel": [[[4], tuner.configs[7].all_kwargs()]]}})
    )
    for index in range(3):
        gpu.peer._compile_share(run, [("a", "", 4)], path, index, 3)
    assert kernel.seen == [(7, True)]  # only what won before
    kernel.seen.clear()
    for index in range(3):
        gpu.peer._compile_share(run, [("d", "a", 4), ("e", "d", 4)], path, index, 3)
    assert sorted(kernel.seen) == [(0, True), (1, True), (7, True)]  # nothing won under "d"
