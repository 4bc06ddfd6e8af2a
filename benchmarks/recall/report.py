"""Makes the table and the picture of a study: the best learning rate of every model.

python benchmarks/recall/report.py results.jsonl --out docs/recall
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import tasks
from matplotlib.figure import Figure
from study import HYBRID, MATRICES, SOFTMAX, STATES

from edgelin.files import replacing

TITLES = {"mqar": "associative recall", "copy": "copying"}
UNITS = {"mqar": "key-value pairs", "copy": "letters"}
ORDER = (*MATRICES, HYBRID, SOFTMAX)
Results = dict[tuple[str, str, int], dict[str, Any]]


def main() -> None:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("recall"), help="name of the files")
    options = parser.parse_args()
    best = read(options.results)
    text = "\n\n".join(table(best, task) for task in tasks.SIZES)
    print(text)
    with replacing(options.out.with_suffix(".md")) as part:
        part.write_text(text + "\n", encoding="utf-8")
    with replacing(options.out.with_suffix(".png")) as part:
        draw(best).savefig(part, format="png", dpi=120)


def read(path: Path) -> Results:
    """The best run of every task, mechanism and state size, by mean accuracy."""
    best: Results = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        key = (run["task"], run["mechanism"], run["state"])
        if key not in best or mean(run) > mean(best[key]):
            best[key] = run
    return best


def mean(run: dict[str, Any]) -> float:
    """Mean accuracy over the sizes of the task."""
    return sum(run["accuracy"].values()) / len(run["accuracy"])


def table(best: Results, task: str) -> str:
    """Markdown: accuracy in percent by mechanism and size."""
    sizes = tasks.SIZES[task]
    head = ["mechanism", "state", *(f"{size} {UNITS[task]}" for size in sizes)]
    lines = [f"**{TITLES[task]}**", "", "| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for mechanism in ORDER:
        for state in STATES:
            run = best.get((task, mechanism, state))
            if run is None:
                continue
            kept = "all tokens" if mechanism == SOFTMAX else f"{state:,}"
            cells = [f"{100 * run['accuracy'][str(size)]:.0f}" for size in sizes]
            lines.append("| " + " | ".join([mechanism, kept, *cells]) + " |")
    return "\n".join(lines)


def draw(best: Results) -> Figure:
    """A row of plots a task, one for every state size; softmax attention in each."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    axes = figure.subplots(len(tasks.SIZES), len(STATES), sharey=True, squeeze=False)
    for row, task in zip(axes, tasks.SIZES, strict=True):
        for place, state in zip(row, STATES, strict=True):
            for color, mechanism in enumerate(ORDER):
                run = best.get((task, mechanism, STATES[0] if mechanism == SOFTMAX else state))
                if run is None:
                    continue
                shares = [100 * run["accuracy"][str(size)] for size in tasks.SIZES[task]]
                style = "k--" if mechanism == SOFTMAX else f"C{color}o-"
                place.plot(tasks.SIZES[task], shares, style, label=mechanism, ms=4)
            place.set_xscale("log", base=2)
            place.set_xticks(tasks.SIZES[task], [str(size) for size in tasks.SIZES[task]])
            place.set_xlabel(UNITS[task])
            place.set_title(f"{TITLES[task]}, {state:,} numbers a layer", fontsize=10)
            place.grid(alpha=0.3)
        row[0].set_ylabel("right answers (%)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    return figure


if __name__ == "__main__":
    main()
