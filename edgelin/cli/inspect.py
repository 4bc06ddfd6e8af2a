"""``edgelin inspect``: states, variants and health of a bundle."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(bundle: Path, as_json: bool) -> None:
    """Show the states, variants and files of BUNDLE, and check that it is whole.

    Every file is compared with its hash and every graph is loaded once. The exit code is 1 when
    something is wrong.

    \b
    Examples:
      edgelin inspect bundle
      edgelin inspect bundle --json
    """
    from edgelin.runtimes.describe import describe

    found = describe(bundle)
    click.echo(json.dumps(found, indent=2) if as_json else _text(found))
    if found["problems"]:
        click.echo(f"Error: {'; '.join(found['problems'])}", err=True)
        sys.exit(1)


def _text(found: dict[str, Any]) -> str:
    """The description as tables."""
    limit = "any number of" if found["max_time"] is None else f"1 .. {found['max_time']}"
    unit = "tokens" if found["input"]["kind"] == "tokens" else "steps"
    head = [
        f"{found['bundle']}: written by edgelin {found['edgelin_version']}",
        f"model        {found['model_hash'][:16]}",
        f"input        {_input(found['input'])}",
        f"output       {_output(found['output'])}",
        f"profile      {found['profile']}, opset {found['opset']}",
        f"a call       {limit} {unit}, {found['chunk']} while reading many",
        f"onnxruntime  >= {found['min_onnxruntime']} needed, "
        f"{found['installed_onnxruntime'] or 'none'} installed",
    ]
    states = [
        [s["name"], " ".join(map(str, s["shape"])), s["layout"], s["dtype"], _bytes(s, unit[:-1])]
        for s in found["states"]
    ]
    total = [["total, one stream", "", "", "", found["state_bytes"]]]
    if growth := found["state_bytes_per_step"]:
        total.append([f"not constant: every {unit[:-1]} adds", "", "", "", growth])
    variants = [
        [
            f"{name} (default)" if name == found["default_variant"] else name,
            _quantisation(entry["quantisation"]),
            entry["bytes"],
            _checked(entry["files"]),
            {True: "yes", False: "no", None: "not tried"}[entry["loads"]],
        ]
        for name, entry in found["variants"].items()
    ]
    others = [[name, e["bytes"], _checked({name: e})] for name, e in found["files"].items()]
    capsules = [
        [
            f"{name} (default)" if name == found["default_capsule"] else name,
            "" if e["position"] is None else e["position"],
            e["variant"] or "",
            e["states"] or "",
            e["bytes"],
            "damaged" if e["problem"] else "sha256 right",
        ]
        for name, e in found["capsules"].items()
    ]
    tables = [
        _table(["state", "shape", "layout", "dtype", "bytes"], [*states, *total]),
        _table(["variant", "weights", "bytes", "files", "loads"], variants),
        _table(["other file", "bytes", "check"], others),
    ]
    if capsules:
        header = ["capsule", f"after {unit}", "made by", "states", "bytes", "check"]
        tables.append(_table(header, capsules))
    return "\n\n".join(["\n".join(head), *tables])


def _bytes(state: dict[str, Any], unit: str) -> str:
    """Size of a state for one stream."""
    growth = state["bytes_per_step"]
    return f"{growth} a {unit}" if growth else str(state["bytes"])


def _input(entry: dict[str, Any]) -> str:
    """What the model reads."""
    if entry["kind"] == "tokens":
        size = f"{entry['vocab_size']} tokens in the vocabulary"
    else:
        size = f"{entry['feature_size']} numbers a step"
    return f"{_tensor(entry)}, {size}"


def _output(entry: dict[str, Any]) -> str:
    """What the model answers."""
    if "task" not in entry:
        return _tensor(entry)
    about = "every step" if entry["head"] == "step" else "all that was read so far"
    shown = [f"{_tensor(entry)}, {entry['task']} of {about}"]
    return ": ".join([*shown, *filter(None, [", ".join(entry["labels"])])])


def _tensor(entry: dict[str, Any]) -> str:
    """Name, type and shape of a graph's input or output."""
    return f"{entry['name']} {entry['dtype']} [{' '.join(map(str, entry['shape']))}]"


def _quantisation(recipe: dict[str, Any] | None) -> str:
    """A recipe in a few words."""
    if recipe is None:
        return "float32"
    if recipe.get("matrices"):
        return f"int{recipe['bits']} and more, chosen for each matrix"
    return f"int{recipe['bits']}, blocks of {recipe['block_size']}"


def _checked(files: dict[str, Any]) -> str:
    """Result of comparing files with the manifest."""
    bad = [entry for entry in files.values() if entry["problem"]]
    if bad:
        return "damaged"
    return " and ".join(sorted({entry["checked"] for entry in files.values()})) + " right"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns; numbers to the right."""
    cells = [header, *[[str(value) for value in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [bool(rows) and isinstance(value, int) for value in (rows[-1] if rows else header)]
    lines = []
    for row in cells:
        padded = [
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
