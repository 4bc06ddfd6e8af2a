"""The outcome of ``edgelin verify`` as a part of the bundle's own report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from edgelin import __version__
from edgelin.errors import EdgelinError
from edgelin.export.report import JSON_NAME, TEXT_NAME
from edgelin.export.verify.report import Comparison, Verification
from edgelin.files import replacing
from edgelin.runtimes.manifest import Manifest, file_records

_KEY = "parity"
_HEADING = "\n## Parity\n"


def record(result: Verification, bundle: Path) -> None:
    """Write a verification into ``report.json`` and ``report.md``, in the place of an earlier one.

    The manifest forgets the two files before they change and knows them again afterwards, so that
    the bundle opens whatever ends the process in between.

    Raises:
        EdgelinError: The bundle has no report, or cannot be written.
    """
    manifest = Manifest.read(bundle)
    try:
        content = json.loads((bundle / JSON_NAME).read_text(encoding="utf-8"))
        text = (bundle / TEXT_NAME).read_text(encoding="utf-8").partition(_HEADING)[0]
        content[_KEY] = _summary(result)
    except (OSError, ValueError, TypeError) as error:
        raise EdgelinError(
            f"{bundle} has no report to add to ({error}); export it again"
        ) from error
    others = {k: v for k, v in manifest.files.items() if k not in (JSON_NAME, TEXT_NAME)}
    pages = {
        JSON_NAME: json.dumps(content, indent=2) + "\n",
        TEXT_NAME: f"{text}{_HEADING}\n{_page(result)}\n",
    }
    try:
        dataclasses.replace(manifest, files=others).write(bundle)
        for name, page in pages.items():
            with replacing(bundle / name) as part:
                part.write_text(page, encoding="utf-8")
        files = {**others, **file_records(bundle, list(pages))}
        dataclasses.replace(manifest, files=files).write(bundle)
    except OSError as error:
        raise EdgelinError(f"{bundle} cannot be written: {error.strerror or error}") from error


def _summary(result: Verification) -> dict[str, Any]:
    """What ``report.json`` keeps: every limit, and the largest error of every tensor."""
    return {
        "edgelin_version": __version__,
        "beside_checkpoint": result.checkpoint is not None,
        "passed": result.passed,
        "comparisons": [_largest(comparison) for comparison in result.comparisons],
        "probes": [{**dataclasses.asdict(p), "passed": p.passed} for p in result.probes],
        "qualities": [{**dataclasses.asdict(q), "passed": q.passed} for q in result.qualities],
        "notes": result.notes,
    }


def _largest(comparison: Comparison) -> dict[str, Any]:
    """A comparison with one error a tensor, and where the worst of all is."""
    tensors: dict[str, float] = {}
    for difference in comparison.differences:
        tensors[difference.tensor] = max(difference.error, tensors.get(difference.tensor, 0.0))
    worst = comparison.worst
    return {
        "variant": comparison.variant,
        "form": comparison.form,
        "against": comparison.against,
        "tolerance": comparison.tolerance,
        "passed": comparison.passed,
        "worst": {"tensor": worst.tensor, "position": worst.position, "length": worst.length},
        "tensors": {name: float(f"{error:.3g}") for name, error in tensors.items()},
    }


def _page(result: Verification) -> str:
    """The section of ``report.md``."""
    beside = "its checkpoint" if result.checkpoint is not None else "itself alone"
    lines = [f"- {line}" for line in map(str, [*result.results, *result.notes])]
    head = f"`edgelin verify` {__version__}, beside {beside}: "
    verdict = "all within their limits." if result.passed else f"FAILED: {result.failure()}"
    return "\n".join([head + verdict, "", *lines])
