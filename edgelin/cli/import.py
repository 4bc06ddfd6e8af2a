"""``edgelin import``: from a checkpoint of another project to one of ours."""

from __future__ import annotations

import os
from pathlib import Path

import click

from edgelin.errors import EdgelinError


@click.command("import", short_help="Turn another project's checkpoint into one of ours.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--out",
    "output",
    type=click.Path(path_type=Path),
    help="Folder to make.  [default: FOLDER-edgelin]",
)
def command(folder: Path, output: Path | None) -> None:
    """Turn FOLDER, a checkpoint of another project, into one that `edgelin train --init` takes.

    FOLDER is local: config.json, safetensors (or .bin, .pth) and tokenizer. `edgelin families`
    lists what is read. The weights keep their type; tensors are read and written one by one.

    \b
    Example:
      edgelin import mamba2-130m -o runs/mamba2
      edgelin train tune.toml --init runs/mamba2
    """
    from tqdm import tqdm

    from edgelin.families.convert import import_folder

    out = output or _beside(folder)
    with tqdm(unit="weight", unit_scale=True, disable=None) as bar:

        def progress(count: int, total: int) -> None:
            bar.total = total
            bar.update(count)

        config = import_folder(folder, out, progress=progress)
    names = [name for name in (*config.layers, *config.sides, *config.mlps) if name]
    kinds = ", ".join(dict.fromkeys(config.mixers[name]["type"] for name in names))
    click.echo(f"{out}: {len(config.layers)} layers ({kinds})")


def _beside(folder: Path) -> Path:
    """FOLDER-edgelin, also where the path ends in a slash or in dots."""
    plain = folder if folder.name not in ("", "..") else Path(os.path.abspath(folder))
    if not plain.name:
        raise EdgelinError(f"{folder} has no name to call the checkpoint by; choose an --out")
    return plain.with_name(f"{plain.name}-edgelin")
