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
from edgelin.export.limits import allowed
from edgelin.export.quantise import plot as quantise_plot
from edgelin.export.quantise.auto import TradeOff
from edgelin.export.quantise.loss import Budget, Loss

JSON_NAME, TEXT_NAME, PLOT_NAME = "report.json", "report.md", "tradeoff.png"
# Largest root mean square error of the logits on the golden stream, relative to a model with the
# same (rounded) weights, of a graph with float activations.
_LIMIT = 1e-4
# Largest single error of such a graph's logits and states, relative to the largest value.
_WORST = 1e-3
# The most that the first may become in a model in which float32 itself misses it.
_MOST = 1e-2
# What rounded activations may cost, times what they cost in the float64 model: two draws of the
# same noise were within a fifth of each other in every model tried.
_ROOM = 1.5
# The same of the largest of many errors.
_WORST_ROOM = 2.0


@dataclass
class VariantReport:
    """One graph of the bundle.

    Args:
        bits: Of the matrices, 32 for float.
        bytes: Of its files.
        nodes: Operator to number of nodes in the graph.
        graph: Against the float64 model with the graph's own (rounded) weights: parity.
        model: Against the float64 model as it was trained: what rounding costs.
        float_activations: As ``graph``, of the same graph with float activations (see
            :mod:`edgelin.export.activations`); None: it has them anyway.
        rounded_activations: What rounded activations do to the float64 model with the graph's own
            weights; None as above.
        ragged: Largest relative error of rows of different lengths in one call, beside each row
            alone; None: the graph takes no lengths.
        float32: Where a limit was missed, what float32 alone does to the model in torch with the
            graph's own weights.
        loss: What a quantised variant costs on the text that it was calibrated with.
        budget: What it may cost there.
        trade_off: What ``--quantize auto`` chose from.
        matrices: Parameter name to bits and relative rounding error, for quantised variants.
        measured: Load time, memory and speed here.
    """

    bits: int
    bytes: int
    nodes: dict[str, int]
    graph: Errors
    model: Errors
    float_activations: Errors | None = None
    rounded_activations: Errors | None = None
    float32: Errors | None = None
    ragged: float | None = None
    loss: Loss | None = None
    budget: Budget | None = None
    trade_off: TradeOff | None = None
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
        return [f"{name}: {line}" for name, v in self.variants.items() for line in _missed(v)]

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
        """Write the files; a plot only if there was something to choose."""
        for variant in self.variants.values():
            if variant.trade_off is not None:
                quantise_plot.draw(variant.trade_off, folder / PLOT_NAME)
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
            lines += [f"    {line}" for line in _loss(variant)]
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
            'graph\'s arithmetic alone; "as trained": with the rounding of the weights. Quantised '
            'graphs round their activations to 8 bits: "left float" is the same graph without '
            'that, "int8 in float64" what it must cost. The stream is of random '
            f"{self.unit}s; `edgelin eval` measures quality on data.",
            "",
            "| variant | against | outputs max | outputs rms | states max | top-1 same | KL, nat |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(
                _error_row(name, against, error)
                for name, variant in self.variants.items()
                for against, error in (
                    ("own weights", variant.graph),
                    ("own weights, activations left float", variant.float_activations),
                    ("own weights, activations int8 in float64", variant.rounded_activations),
                    ("own weights, torch in float32", variant.float32),
                    ("as trained", variant.model),
                )
                if error is not None
            ),
            "",
        ]
        for name, variant in self.variants.items():
            if variant.ragged is not None:
                lines += [
                    f"Rows of different lengths in one call of {name}: off by {variant.ragged:.1e} "
                    f"beside each row alone.",
                    "",
                ]
            if (rows := _loss(variant)) and variant.trade_off is not None:
                rows.append(f"![cost and loss]({PLOT_NAME})")
            lines += [line for row in rows for line in (f"{name}: {row}", "")]
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


def _missed(variant: VariantReport) -> list[str]:
    """The gates that a graph missed."""
    lost = variant.budget.missed(variant.loss) if variant.budget and variant.loss else []
    return [*_inexact(variant), *_uneven(variant), *lost]


def _loss(variant: VariantReport) -> list[str]:
    """What rounding costs, and what there was to choose from."""
    if (loss := variant.loss) is None:
        return []
    lines = [] if variant.trade_off is None else variant.trade_off.lines()
    return [
        f"on {loss.tokens:,} tokens of the text: {loss.bits_per_byte:.4f} bits per byte, float "
        f"{loss.float_bits_per_byte:.4f} ({100 * loss.relative:+.2f} %), {loss.kl:.4f} nat from "
        f"float, top-1 the same {100 * loss.top1:.1f} %",
        *lines,
    ]


def _uneven(variant: VariantReport) -> list[str]:
    """Whether rows of one call disturb each other."""
    limit, rounded = _WORST, variant.rounded_activations
    if rounded is not None:  # a last bit may move one of these by a whole step
        limit += _WORST_ROOM * max(rounded.outputs, rounded.states or 0)
    if variant.ragged is None or variant.ragged <= limit:
        return []
    return [f"rows of a ragged call are off by {variant.ragged:.2g}, limit {limit:.2g}"]


def _inexact(variant: VariantReport) -> list[str]:
    """The gates of the golden stream."""
    graph, floats, rounded = variant.graph, variant.float_activations, variant.rounded_activations
    if not graph.finite:
        return ["outputs or states are not finite"]
    if floats is None or rounded is None:
        return _far_off(graph, "", variant.float32)
    missed = _far_off(floats, " with float activations", variant.float32)
    limit = _LIMIT + _ROOM * rounded.outputs_rms
    if not graph.outputs_rms <= limit:
        missed.append(
            f"outputs are off by {graph.outputs_rms:.2g}, which rounded activations do not explain "
            f"(limit {limit:.2g})"
        )
    return missed


def is_near(error: Errors, float32: Errors | None = None) -> bool:
    """Whether a graph with float activations is near enough to the model with its weights."""
    return not _far_off(error, "", float32)


def _far_off(error: Errors, how: str, float32: Errors | None) -> list[str]:
    """Why :func:`is_near` is false."""
    limit, most = _LIMIT, _WORST
    if float32 is not None:
        largest = max(float32.outputs, float32.states or 0)
        limit = allowed(limit, float32.outputs_rms, _MOST)
        most = allowed(most, largest)
    worst = max(error.outputs, error.states or 0)
    if not error.outputs_rms <= limit:
        return [f"outputs{how} are off by {error.outputs_rms:.2g}, limit {limit:.2g}"]
    if not worst <= most:
        return [f"worst value{how} is off by {worst:.2g}, limit {most:.2g}"]
    return []


def _error_row(name: str, against: str, error: Errors) -> str:
    """One line of the second table."""
    top1 = "-" if error.top1 is None else f"{100 * error.top1:.1f} %"
    kl = "-" if error.kl is None else f"{error.kl:.1e}"
    states = "-" if error.states is None else f"{error.states:.1e}"
    return (
        f"| {name} | {against} | {error.outputs:.1e} | {error.outputs_rms:.1e} | "
        f"{states} | {top1} | {kl} |"
    )
