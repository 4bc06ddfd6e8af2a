"""``edgelin export``: from a checkpoint to a bundle that a device can run."""

from __future__ import annotations

import os
from pathlib import Path

import click

from edgelin.errors import EdgelinError


@click.command("export", short_help="Turn a checkpoint into a bundle that a device can run.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--out",
    "output",
    type=click.Path(path_type=Path),
    help="Folder to make.  [default: CHECKPOINT-bundle]",
)
@click.option(
    "--quantize",
    type=click.Choice(["none", "int8", "int4", "int4-fast"]),
    multiple=True,
    default=("none",),
    show_default=True,
    help="Weights of the graph; give it several times for several variants. int4 keeps mixers at 8 "
    "bits, int4-fast does not.",
)
@click.option(
    "--profile",
    type=click.Choice(["fused", "plain", "onnx"]),
    default="fused",
    show_default=True,
    help="Operators: onnxruntime's own, standard ones of opset 21, or opset 27.",
)
@click.option(
    "--attention",
    default="full",
    show_default=True,
    metavar="full|window=N[,sinks=M]",
    help="Layers that attend to all tokens: keep a state that grows, or see the last N tokens and "
    "the first M in constant memory.",
)
@click.option(
    "--text",
    metavar="F",
    help="Report what that window costs in bits per byte of this UTF-8 file (also .xz or .gz; - is "
    "stdin).",
)
@click.option(
    "--streams",
    is_flag=True,
    help="Let one call read prompts of different lengths, for many streams at once; a step costs "
    "more.",
)
@click.option("--force", is_flag=True, help="Replace an existing bundle, once the new one passed.")
def command(
    checkpoint: Path,
    output: Path | None,
    quantize: tuple[str, ...],
    profile: str,
    attention: str,
    text: str | None,
    streams: bool,
    force: bool,
) -> None:
    """Turn CHECKPOINT into a bundle that a device can run.

    The bundle is run and compared with the model before it is put in place. A summary is printed,
    the whole report is report.md. If a gate is missed, the bundle is kept as OUT.failed and the
    exit code is 1.

    \b
    Examples:
      edgelin export runs/books -o books-bundle --quantize none --quantize int8
      edgelin export hybrid --attention window=1024,sinks=4 --text held-out.txt
    """
    from edgelin.export.bundle import export_checkpoint
    from edgelin.runtimes.text_file import read_text

    report = export_checkpoint(
        checkpoint,
        output or _beside(checkpoint),
        quantise=quantize,
        profile=profile,
        force=force,
        attention=attention,
        text=None if text is None else read_text(text),
        streams=streams,
    )
    click.echo(report.summary())


def _beside(checkpoint: Path) -> Path:
    """CHECKPOINT-bundle, also where the path ends in a slash or in dots."""
    plain = checkpoint if checkpoint.name not in ("", "..") else Path(os.path.abspath(checkpoint))
    if not plain.name:
        raise EdgelinError(f"{checkpoint} has no name to call the bundle by; choose an --out")
    return plain.with_name(f"{plain.name}-bundle")
