"""What :mod:`edgelin.export.verify` found: numbers, a table, and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgelin.errors import EdgelinError
from edgelin.files import replacing

TRUTH = "recurrence in float64"
TOLERANCE = 1e-4  # of float32 forms, relative


@dataclass(frozen=True)
class Difference:
    """Errors of one tensor in one run of a form.

    Args:
        tensor: ``"logits"`` or ``"outputs"``, ``"hidden.<layer>"`` (the stream after a block), or a
            state's name.
        length: Tokens T of the run.
        errors: Position to max|x - y| / max|y|; states have one at the end of each call only.
    """

    tensor: str
    length: int
    errors: dict[int, float]

    @property
    def position(self) -> int:
        """Where the error is largest."""
        return max(self.errors, key=lambda t: self.errors[t])

    @property
    def error(self) -> float:
        """The largest error."""
        return self.errors[self.position]

    @property
    def layer(self) -> int | None:
        """Layer of the tensor; None for the outputs and for states of the whole model."""
        index = self.tensor.rpartition(".")[2]
        return int(index) if index.isdigit() else None


@dataclass(frozen=True)
class Comparison:
    """All that one form differs from another.

    Args:
        variant: Graph of the bundle, or None for a form in torch.
        form: What was compared.
        against: What it was compared with.
        tolerance: Largest error that passes.
        differences: One a tensor and length.
    """

    variant: str | None
    form: str
    against: str
    tolerance: float
    differences: list[Difference]

    @property
    def worst(self) -> Difference:
        """The tensor and length with the largest error."""
        return max(self.differences, key=lambda d: d.error)

    @property
    def passed(self) -> bool:
        """Whether no error is beyond the tolerance."""
        return self.worst.error <= self.tolerance

    def __str__(self) -> str:
        worst, label = self.worst, " ".join(filter(None, [self.variant, self.form]))
        return (
            f"{label} beside {self.against}: at most {worst.error:.1e} ({worst.tensor} at position "
            f"{worst.position} of {worst.length}), {_allowed(self.tolerance, self.passed)}"
        )


@dataclass(frozen=True)
class Quality:
    """A quantised variant's answers beside the float model's.

    Args:
        variant: Graph of the bundle.
        against: The float model.
        unit: ``"token"`` or ``"step"``.
        positions: Answers compared.
        limit: Largest divergence or error that passes.
        kl: Mean Kullback-Leibler divergence in nat; None in a regression.
        top1: Share of positions with the same most probable token or class; None as above.
        relative_error: rms(x - y) / rms(y - mean(y)) of a regression.
    """

    variant: str
    against: str
    unit: str
    positions: int
    limit: float
    kl: float | None = None
    top1: float | None = None
    relative_error: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the divergence or error is within its limit."""
        measured = self.relative_error if self.kl is None else self.kl
        return measured is not None and measured <= self.limit

    def __str__(self) -> str:
        if self.kl is None or self.top1 is None:
            measured = f"relative error {self.relative_error:.2e}"
        else:
            measured = f"KL {self.kl:.2e} nat, top-1 {100 * self.top1:.1f} %"
        return (
            f"{self.variant} beside {self.against}: {measured} of {self.positions} {self.unit}s, "
            f"{_allowed(self.limit, self.passed)}"
        )


@dataclass(frozen=True)
class Sensitivity:
    """What changing one thing in one row does to a graph (:mod:`edgelin.export.verify.probe`).

    Args:
        variant: Graph of the bundle.
        tolerance: Largest change of the other rows.
        read: State to how far another one moves the answers.
        written: State to how far other steps move it.
        bleed: Largest change of a row that nothing was done to.
    """

    variant: str
    tolerance: float
    read: dict[str, float]
    written: dict[str, float]
    bleed: float

    @property
    def passed(self) -> bool:
        """Whether every state is read and written, and rows keep to themselves."""
        return not self._dead() and self.bleed <= self.tolerance

    def _dead(self) -> list[str]:
        """What has no effect, in words."""
        unread = [f"{name} moves nothing" for name, effect in self.read.items() if effect == 0]
        fixed = [f"nothing moves {name}" for name, effect in self.written.items() if effect == 0]
        return unread + fixed

    def __str__(self) -> str:
        if dead := self._dead():
            return f"{self.variant} has states WITHOUT EFFECT: {', '.join(dead)}"
        if not self.passed:
            return (
                f"{self.variant}: a row moves others by {self.bleed:.1e}, "
                f"{_allowed(self.tolerance, self.passed)}"
            )
        least = min(self.read, key=lambda name: self.read[name])
        return (
            f"{self.variant}: every state moves the answers ({least} least, by "
            f"{self.read[least]:.1e}) and is moved by the steps; no row moves another"
        )


@dataclass
class Verification:
    """Result of :func:`edgelin.export.verify.compare.verify`.

    Args:
        bundle: Folder of the bundle.
        checkpoint: Folder of the checkpoint, or None.
        notes: What was checked besides, and what could not be.
        comparisons: Form beside form.
        qualities: One a quantised variant that had a float model beside it.
        probes: One a variant.
    """

    bundle: str
    checkpoint: str | None
    notes: list[str] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    qualities: list[Quality] = field(default_factory=list)
    probes: list[Sensitivity] = field(default_factory=list)

    @property
    def results(self) -> list[Comparison | Quality | Sensitivity]:
        """All that has a limit."""
        return [*self.comparisons, *self.probes, *self.qualities]

    @property
    def passed(self) -> bool:
        """Whether everything is within its limit."""
        return all(result.passed for result in self.results)

    def failure(self) -> str:
        """What is beyond its limit, in one line."""
        return "; ".join(str(result) for result in self.results if not result.passed)

    def table(self) -> str:
        """Layers by forms, then the worst position of every form, as text."""
        beside_truth = [c for c in self.comparisons if c.against == TRUTH]
        return "\n".join([*_layers_by_forms(beside_truth), *map(str, self.results), *self.notes])

    def write(self, path: Path) -> None:
        """Write everything as JSON; an error that is not finite stands as null.

        Raises:
            EdgelinError: The file cannot be written.
        """
        try:
            with replacing(path) as part:
                part.write_text(json.dumps(_plain(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise EdgelinError(f"{path} cannot be written: {error.strerror}") from error


def _layers_by_forms(comparisons: list[Comparison]) -> list[str]:
    """One line a tensor, one column a form: the largest error over all lengths."""
    if not comparisons:
        return []
    layers: dict[str, int] = {}
    for d in (d for c in comparisons for d in c.differences):
        layers[d.tensor] = 2**31 if d.layer is None else d.layer
    tensors = sorted(layers, key=lambda name: (layers[name], name))
    columns = [
        [" ".join(filter(None, [c.variant, c.form])), *(_cell(c, tensor) for tensor in tensors)]
        for c in comparisons
    ]
    rows = zip(["tensor", *tensors], *columns, strict=True)
    widths = [max(map(len, column)) for column in (["tensor", *tensors], *columns)]
    return [
        "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _cell(comparison: Comparison, tensor: str) -> str:
    """Largest error of one tensor, or a dash where the form does not show it."""
    errors = [d.error for d in comparison.differences if d.tensor == tensor]
    return f"{max(errors):.1e}" if errors else "-"


def _allowed(limit: float, passed: bool) -> str:
    """The limit and the verdict."""
    return f"allowed {limit:.0e}" if passed else f"BEYOND the allowed {limit:.0e}"


def _plain(result: Verification) -> dict[str, Any]:
    """JSON form of a result."""
    content: dict[str, Any] = {**asdict(result), "passed": result.passed}
    for entry, comparison in zip(content["comparisons"], result.comparisons, strict=True):
        entry["passed"] = comparison.passed
        for line in entry["differences"]:
            line["errors"] = {
                str(t): float(f"{e:.3g}") if math.isfinite(e) else None
                for t, e in line["errors"].items()
            }
    for entry, quality in zip(content["qualities"], result.qualities, strict=True):
        entry["passed"] = quality.passed
    for entry, probe in zip(content["probes"], result.probes, strict=True):
        entry["passed"] = probe.passed
    return content
