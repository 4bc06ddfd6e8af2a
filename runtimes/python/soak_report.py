"""What a soak found, as ``soak.json``, ``soak.md`` and ``soak.png``, and whether that is sound."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from edgelin import __version__
from edgelin.errors import EdgelinError
from edgelin.files import replacing
from edgelin.runtimes.manifest import Manifest
from edgelin.runtimes.measure import save_figure, write_json
from edgelin.runtimes.soak import Point, Progress

_MEMORY = 8 << 20  # bytes that a process may grow by once it has warmed up
_WARM = 4096  # steps until memory pools have settled, and within which a distance is a short text's
# A distance from the float64 model far down the stream may be so many times one within _WARM: each
# is of one position, and rounded activations scatter. What float32 makes of it is always allowed.
_ROOM, _FLOAT32 = 4.0, 1e-4


@dataclass(frozen=True)
class Verdict:
    """One claim about the stream.

    Args:
        claim: What should be so.
        passed: Whether it is; None: it was not looked at.
        text: What was measured, or why nothing was.
    """

    claim: str
    passed: bool | None
    text: str

    def __str__(self) -> str:
        word = {True: "yes", False: "NO", None: "not measured"}[self.passed]
        return f"{self.claim}: {word}, {self.text}"


@dataclass
class SoakReport:
    """Outcome of a soak.

    Args:
        bundle: The folder.
        manifest: Its manifest.
        progress: What the stream showed.
        distances: ``asdict`` of :class:`edgelin.export.soak_reference.Distance`; None: no
            checkpoint was given.
    """

    bundle: Path
    manifest: Manifest
    progress: Progress
    distances: list[dict[str, Any]] | None

    @property
    def verdicts(self) -> list[Verdict]:
        """All claims."""
        return [self._finite(), self._memory(), self._drift()]

    @property
    def passed(self) -> bool:
        """Whether no claim is false."""
        return all(verdict.passed is not False for verdict in self.verdicts)

    def failure(self) -> str:
        """The false claims, in one line."""
        return "; ".join(str(v) for v in self.verdicts if v.passed is False)

    def as_dict(self) -> dict[str, Any]:
        """Content of ``soak.json``."""
        return {
            "format": 1,
            "edgelin_version": __version__,
            "onnxruntime_version": onnxruntime.__version__,
            "machine": platform.machine(),
            "bundle": str(self.bundle),
            "profile": self.manifest.profile,
            "passed": self.passed,
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            **asdict(self.progress),
            "float64": self.distances,
        }

    def write(self, folder: Path) -> None:
        """Write JSON and text.

        Raises:
            EdgelinError: A file cannot be written.
        """
        write_json(self.as_dict(), folder / "soak.json")
        try:
            with replacing(folder / "soak.md") as part:
                part.write_text(self.text(), encoding="utf-8")
        except OSError as error:
            raise EdgelinError(f"{folder / 'soak.md'} cannot be written: {error}") from error

    def text(self) -> str:
        """Content of ``soak.md``."""
        progress, unit = self.progress, self.manifest.input.unit
        calls = f"one {unit} a call" if progress.one_by_one else f"64 {unit}s a call"
        lines = [
            f"# Soak of {self.bundle.resolve().name}, {progress.variant}",
            "",
            f"{progress.position:,} {unit}s ({progress.label}), {calls}; profile "
            f"{self.manifest.profile}, edgelin {__version__}, onnxruntime "
            f"{onnxruntime.__version__}, {platform.machine()}.",
            "",
            *(f"- {verdict}" for verdict in self.verdicts),
            "",
            f"| {unit}s | step ms | RSS MiB | entropy, nat | largest state "
            "| outputs from float64 | KL, nat | worst state from float64 |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *(self._row(point) for point in progress.points),
            "",
            "| state | norm at first | norm at last | largest magnitude |",
            "| --- | --- | --- | --- |",
            *self._states(),
            "",
        ]
        return "\n".join(lines)

    def _finite(self) -> Verdict:
        failure = self.progress.failure
        unit = self.manifest.input.unit
        found = failure or f"over {self.progress.position:,} {unit}s"
        return Verdict("no NaN or infinity", failure is None, found)

    def _memory(self) -> Verdict:
        """Whether resident memory stays, within every start of the process."""
        claim = "flat memory"
        if any(spec.growing_axis is not None for spec in self.manifest.states):
            return Verdict(claim, None, "a state of this model grows by design")
        growth = [
            runs[-1].rss_bytes - runs[0].rss_bytes
            for run in range(1, self.progress.run + 1)
            if (runs := [p for p in self._late_points() if p.run == run])
        ]
        if not growth:
            return Verdict(claim, None, f"fewer than {_WARM} {self.manifest.input.unit}s were read")
        found = f"{max(growth) / 2**20:+.2f} MiB after {_WARM} {self.manifest.input.unit}s"
        return Verdict(claim, max(growth) <= _MEMORY, found)

    def _drift(self) -> Verdict:
        """Whether the distance from the float64 model does not grow with the stream."""
        claim = "bounded drift"
        if self.distances is None:
            return Verdict(claim, None, "no float64 model beside it; give --checkpoint")
        worst = {d["position"]: max(d["outputs"], *d["states"].values()) for d in self.distances}
        early = max((x for p, x in worst.items() if p <= _WARM), default=0.0)
        late = max((x for p, x in worst.items() if p > _WARM), default=0.0)
        limit = max(_FLOAT32, _ROOM * early)
        found = (
            f"over {max(worst, default=0):,} {self.manifest.input.unit}s: at most {late:.1e} after "
            f"{_WARM}, {early:.1e} before (allowed {limit:.0e})"
        )
        return Verdict(claim, late <= limit, found)

    def _late_points(self) -> list[Point]:
        return [point for point in self.progress.points if point.position >= _WARM]

    def _row(self, point: Point) -> str:
        """One line of the first table."""
        name = max(point.largest, key=lambda key: point.largest[key])
        known = [d for d in self.distances or [] if d["position"] == point.position]
        far = ["-"] * 3
        if known:
            state = max(known[0]["states"], key=lambda key: known[0]["states"][key])
            kl = "-" if known[0]["kl"] is None else f"{known[0]['kl']:.1e}"
            worst = f"{known[0]['states'][state]:.1e} ({state})"
            far = [f"{known[0]['outputs']:.1e}", kl, worst]
        cells = [
            f"{point.position:,}",
            f"{point.step_ms:.3f}",
            f"{point.rss_bytes / 2**20:.1f}",
            "-" if point.entropy is None else f"{point.entropy:.3f}",
            f"{point.largest[name]:.3g} ({name})",
            *far,
        ]
        return f"| {' | '.join(cells)} |"

    def _states(self) -> list[str]:
        """The second table."""
        points = self.progress.points
        if not points:
            return []
        return [
            f"| {name} | {points[0].norms[name]:.3g} | {points[-1].norms[name]:.3g} "
            f"| {max(point.largest[name] for point in points):.3g} |"
            for name in points[-1].norms
        ]


def plot(report: SoakReport, path: Path) -> None:
    """Draw states, entropy, step time, memory and distance against position."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 2, sharex=True)
    points, unit = report.progress.points, report.manifest.input.unit
    x = [point.position for point in points]
    for axis, key, label in (
        (axes[0, 0], "largest", "largest magnitude of a state"),
        (axes[0, 1], "norms", "norm of a state"),
    ):
        for name in points[-1].norms:
            axis.plot(x, [getattr(point, key)[name] for point in points], lw=1, label=name)
        axis.set(ylabel=label, xscale="log", yscale="log")
    axes[0, 1].legend(fontsize=5, ncols=2)
    axes[1, 0].plot(x, [point.step_ms for point in points], "o-")
    axes[1, 0].set(ylabel=f"median {unit}, ms", ylim=(0, None))
    memory = [point.rss_bytes / 2**20 for point in points]
    axes[1, 1].plot(x, memory, "o-")
    axes[1, 1].set(ylabel="resident memory, MiB", ylim=(0, 1.2 * max(memory, default=1)))
    entropy = [(point.position, point.entropy) for point in points if point.entropy is not None]
    if entropy:
        axes[2, 0].plot(*zip(*entropy, strict=True), "o-")
    axes[2, 0].set(xlabel=f"position, {unit}s", ylabel="entropy of an answer, nat", ylim=(0, None))
    if report.distances:
        at = [d["position"] for d in report.distances]
        axes[2, 1].plot(at, [d["outputs"] for d in report.distances], "o-", label="outputs")
        worst = [max(d["states"].values()) for d in report.distances]
        axes[2, 1].plot(at, worst, "o-", label="worst state")
        axes[2, 1].set(yscale="log")
        axes[2, 1].legend(fontsize="small")
    axes[2, 1].set(xlabel=f"position, {unit}s", ylabel="relative error beside float64")
    figure.suptitle(f"{report.bundle.resolve().name}, {report.progress.variant}")
    save_figure(figure, path)
