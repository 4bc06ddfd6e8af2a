"""What an export found out, as ``report.json`` and ``report.md``, and the gates it must pass."""

from __future__ import annotations

import json
import platform
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime

from edgelin import __version__
from edgelin.export.attention import Attention, Cost
from edgelin.export.golden import Errors

JSON_NAME, TEXT_NAME = "report.json", "report.md"
# Largest root mean square error of the logits on the golden stream, relative to a model with the
# same (rounded) weights. int8 activations leave 0.01 to 0.1; a wrong graph or packing 1 and more.
_LIMIT, _QUANTISED_LIMIT = 1e-4, 0.3
# Largest single error of a float graph's logits and states, relative to the largest value.
_WORST = 1e-3


@dataclass
class VariantReport:
    """One graph of the bundle.

    Args:
        bits: Of the matrices, 32 for float.
        bytes: Of its files.
        nodes: Operator to number of nodes in the graph.
        graph: Against the float64 model with the graph's own (rounded) weights: parity.
        model: Against the float64 model as it was trained: what rounding costs.
        matrices: Parameter name to bits and relative rounding error, for quantised variants.
        measured: Load time, memory and speed here.
    """

    bits: int
    bytes: int
    nodes: dict[str, int]
    graph: Errors
    model: Errors
    matrices: dict[str, dict[str, float]] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)


@dataclass
class Report:
    """Outcome of :func:`edgelin.export.bundle.export_checkpoint`.

    Args:
        bundle: The folder written.
        profile: Name of the profile.
        layers: Layers of the model.
        unit: ``"token"`` or ``"step"``, what the measured speeds count.
        parameters: Trainable numbers of the model.
        state_bytes: Size of a stream's state before the first step.
        state_bytes_per_step: What every step adds to it; 0 where it is constant.
        variants: Name to what was found of it.
        attention: What layers that attended to all tokens became.
        attention_cost: What that costs on a text, if one was given.
    """

    bundle: Path
    profile: str
    layers: int
    unit: str
    parameters: int
    state_bytes: int
    state_bytes_per_step: int
    variants: dict[str, VariantReport]
    attention: Attention
    attention_cost: Cost | None

    def failures(self) -> list[str]:
        """Every gate that was missed, in words."""
        missed = []
        for name, variant in self.variants.items():
            error = variant.graph
            limit = _LIMIT if variant.bits == 32 else _QUANTISED_LIMIT
            if not error.finite:
                missed.append(f"{name}: outputs or states are not finite")
            elif error.outputs_rms > limit:
                missed.append(
                    f"{name}: outputs are off by {error.outputs_rms:.2g}, limit {limit:g}"
                )
            elif variant.bits == 32 and max(error.outputs, error.states) > _WORST:
                worst = max(error.outputs, error.states)
                missed.append(f"{name}: worst value is off by {worst:.2g}, limit {_WORST:g}")
        return missed

    def as_dict(self) -> dict[str, Any]:
        """Content of ``report.json``."""
        return {
            "format": 1,
            "edgelin_version": __version__,
            "onnxruntime_version": onnxruntime.__version__,
            "machine": platform.machine(),
            "profile": self.profile,
            "layers": self.layers,
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "state_bytes_per_step": self.state_bytes_per_step,
            "attention": str(self.attention),
            "attention_cost": None if self.attention_cost is None else asdict(self.attention_cost),
            "failures": self.failures(),
            "variants": {name: asdict(variant) for name, variant in self.variants.items()},
        }

    def write(self, folder: Path) -> None:
        """Write both files."""
        text = json.dumps(self.as_dict(), indent=2) + "\n"
        (folder / JSON_NAME).write_text(text, encoding="utf-8")
        (folder / TEXT_NAME).write_text(self.text(), encoding="utf-8")

    def summary(self) -> str:
        """What a terminal shows: a line a variant, and where the rest stands."""
        lines = [
            f"{self.bundle}: profile {self.profile}, {self.parameters:,} parameters, "
            f"{self.state_bytes / 1e6:.2f} MB of state a stream",
            *(f"  {line}" for line in self._attention()),
        ]
        for name, variant in self.variants.items():
            here = variant.measured
            lines.append(
                f"  {name}: {variant.bytes / 1e6:.1f} MB, {sum(variant.nodes.values())} nodes, "
                f"about {here.get(f'decode_{self.unit}s_per_s', 0):,.0f} {self.unit}s/s; "
                f"{variant.graph.outputs_rms:.0e} beside the float64 model with its weights"
            )
        return "\n".join([*lines, f"The whole report: {self.bundle / TEXT_NAME}"])

    def text(self) -> str:
        """Content of ``report.md``: tables for people."""
        lines = [
            f"# Export report: profile {self.profile}",
            "",
            f"{self.parameters:,} parameters, {self.layers} layers, {self.state_bytes:,} bytes of "
            f"state a stream; edgelin {__version__}, onnxruntime {onnxruntime.__version__}, "
            f"{platform.machine()}.",
            "",
            *(f"{line}\n" for line in self._attention()),
            f"| variant | MB | nodes | a layer | load s | RSS MB | decode {self.unit}s/s "
            f"| prefill {self.unit}s/s |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *(self._size_row(name, variant) for name, variant in self.variants.items()),
            "",
            'Relative errors on the golden stream, against the float64 model. "Own weights": the '
            'graph\'s arithmetic alone; "as trained": with the rounding of the weights. The stream '
            f"is of random {self.unit}s; `edgelin eval` measures quality on data.",
            "",
            "| variant | against | outputs max | outputs rms | states max | top-1 same | KL, nat |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(
                _error_row(name, against, error)
                for name, variant in self.variants.items()
                for against, error in (
                    ("own weights", variant.graph),
                    ("as trained", variant.model),
                )
            ),
            "",
        ]
        for name, variant in self.variants.items():
            nodes = ", ".join(f"{n} {count}" for n, count in variant.nodes.items())
            lines += [f"Nodes of {name}: {nodes}.", ""]
        return "\n".join(lines)

    def _attention(self) -> list[str]:
        """What a state that grows, or its replacement by a window, means for the user."""
        if self.state_bytes_per_step:
            return [
                f"Not constant memory: the state grows by {self.state_bytes_per_step:,} bytes a "
                f"{self.unit}, and the time of a {self.unit} with it."
            ]
        if not self.attention.window:
            return []
        sinks = f" and the first {self.attention.sinks}" if self.attention.sinks else ""
        lines = [
            f"Not the checkpoint's attention: where it sees all {self.unit}s, this model sees the "
            f"last {self.attention.window:,}{sinks}, in constant memory."
        ]
        if (cost := self.attention_cost) is None:
            return [*lines, "What that costs was not measured; --text FILE does."]
        change = 100 * (cost.window / cost.full - 1)
        return [
            *lines,
            f"On {cost.tokens:,} tokens of the text: {cost.full:.4f} bits per byte with all of "
            f"them in sight, {cost.window:.4f} with the window ({change:+.2f} %), before "
            f"quantisation.",
        ]

    def _size_row(self, name: str, variant: VariantReport) -> str:
        count, here = sum(variant.nodes.values()), variant.measured
        cells = [
            name,
            f"{variant.bytes / 1e6:.1f}",
            str(count),
            f"{count / self.layers:.1f}",
            f"{here.get('load_s', 0):.2f}",
            f"{here.get('rss_bytes', 0) / 1e6:.0f}",
            f"{here.get(f'decode_{self.unit}s_per_s', 0):.0f}",
            f"{here.get(f'prefill_{self.unit}s_per_s', 0):.0f}",
        ]
        return f"| {' | '.join(cells)} |"


def count_nodes(op_types: list[str]) -> dict[str, int]:
    """Operators by number, most frequent first."""
    return dict(sorted(Counter(op_types).items(), key=lambda item: (-item[1], item[0])))


def _error_row(name: str, against: str, error: Errors) -> str:
    """One line of the second table."""
    top1 = "-" if error.top1 is None else f"{100 * error.top1:.1f} %"
    kl = "-" if error.kl is None else f"{error.kl:.1e}"
    return (
        f"| {name} | {against} | {error.outputs:.1e} | {error.outputs_rms:.1e} | "
        f"{error.states:.1e} | {top1} | {kl} |"
    )
