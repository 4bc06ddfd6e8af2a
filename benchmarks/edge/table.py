"""A page of the newest result of every figure.

python benchmarks/edge/table.py bundles/edge/results.jsonl > docs/edge.md
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def main() -> None:
    """Read the file of results and print the page."""
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    print(page([json.loads(line) for line in lines]))


def page(lines: list[Line]) -> str:
    """Markdown: a row a figure, in the order in which they were first measured."""
    newest = {line["figure"]: line for line in lines}
    rows = [
        "# Decoding on a CPU",
        "",
        "Medians of paired rounds, measured by [`benchmarks/edge`](../benchmarks/edge/README.md) "
        "with models of random weights.",
        "",
        "| figure | bar | value | sides: median (least to most) | date |",
        "| --- | ---: | ---: | --- | --- |",
        *(row(line) for line in newest.values()),
        "",
    ]
    machines = sorted({line["machine"] for line in newest.values()})
    versions = {f"{k} {v}" for line in newest.values() for k, v in line["versions"].items()}
    return "\n".join([*rows, f"{'; '.join(machines)}. {', '.join(sorted(versions))}."])


def row(line: Line) -> str:
    """One figure."""
    sign = "<=" if line["at_most"] else ">="
    mark = "" if line["reached"] else " (missed)"
    sides = []
    for name, values in zip(line["sides"], zip(*line["rounds"], strict=True), strict=False):
        middle, low, high = statistics.median(values), min(values), max(values)
        sides.append(f"{name}: {middle:.3g} ({low:.3g} to {high:.3g})")
    if "nodes" in line["details"]:
        sides.append(f"{line['details']['nodes']} nodes in the graph")
    cells = [
        line["text"],
        f"{sign} {line['bar']:g}",
        f"{line['value']:.3g}{mark}",
        "<br>".join(sides),
        line["date"][:10],
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
