"""``edgelin families``: which checkpoints of other projects are read."""

from __future__ import annotations

from collections.abc import Sequence

import click


@click.command()
def command() -> None:
    """List the checkpoints of other projects that export, import, verify and eval read.

    A family is found by the model_type of its config.json. Below stand the states of every kind of
    layer, and which of its recurrences the fused profile runs with one operator each; the plain
    profile writes all of them with standard operators.

    \b
    Example:
      edgelin families | grep mamba
    """
    from edgelin import catalogue

    found = catalogue.families()
    rows = [
        (family.name, ", ".join(family.model_types), ", ".join(family.mixers)) for family in found
    ]
    click.echo(_table(("family", "model_type", "layers"), rows))
    names = sorted({name for family in found for name in family.mixers})
    layers = []
    for mixer in map(catalogue.mixer, names):
        states = "; ".join(f"{kind} [{layout}]" for kind, layout in mixer.states) or "none"
        layers.append((mixer.name, ", ".join(mixer.fused) or "-", states))
    click.echo()
    click.echo(_table(("layer", "fused", "states"), layers))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell, but for the last."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    widths[-1] = 0
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (head, *rows)
    ]
    return "\n".join(lines)
