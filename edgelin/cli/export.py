"""``edgelin export``: from a checkpoint to a bundle that a device can run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgelin.errors import EdgelinError

if TYPE_CHECKING:
    from edgelin.export.quantise.plan import Calibration


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
    type=click.Choice(["none", "int8", "int4", "int4-fast", "auto"]),
    multiple=True,
    default=("none",),
    show_default=True,
    help="Weights of the graph; give it several times for several variants. int4 keeps mixers at 8 "
    "bits, int4-fast does not, auto chooses for every matrix.",
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="ROLE=BITS",
    help="Bits of a kind of tensor: embedding, head, mixer, mlp, experts, gates or router; int4, "
    "int8 or float. May be given several times.",
)
@click.option(
    "--calibrate",
    metavar="F",
    help="Round with what the model reads on this UTF-8 file (also .xz or .gz; - is stdin).",
)
@click.option(
    "--method",
    type=click.Choice(["gptq", "nearest"]),
    help="How to round with --calibrate.  [default: gptq]",
)
@click.option(
    "--budget",
    type=float,
    help="Most that bits per byte of the text may grow, as a share.  [default with auto, "
    "unless --budget-kl is given: 0.02]",
)
@click.option("--budget-kl", type=float, help="The same as a KL from the float model, in nat.")
@click.option(
    "--budget-top1",
    type=float,
    help="Least share of positions whose first choice stays the float model's.  [default with "
    "auto, unless --budget-kl is given: 0.93]",
)
@click.option(
    "--minimise",
    type=click.Choice(["size", "time"]),
    help="What auto saves within the budget.  [default: size]",
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
@click.option(
    "--portable",
    is_flag=True,
    help="Write also model_quantized.onnx, the int4 weights in standard operators, for browsers: "
    "the size of int4, the speed and activations of float.",
)
@click.option("--force", is_flag=True, help="Replace an existing bundle, once the new one passed.")
def command(
    checkpoint: Path,
    output: Path | None,
    quantize: tuple[str, ...],
    roles: tuple[str, ...],
    calibrate: str | None,
    method: str | None,
    budget: float | None,
    budget_kl: float | None,
    budget_top1: float | None,
    minimise: str | None,
    profile: str,
    attention: str,
    text: str | None,
    streams: bool,
    portable: bool,
    force: bool,
) -> None:
    """Turn CHECKPOINT into a bundle that a device can run.

    The bundle is run and compared with the model before it is put in place. A summary is printed,
    the whole report is report.md. If a gate is missed, the bundle is kept as OUT.failed and the
    exit code is 1.

    \b
    Examples:
      edgelin export runs/books -o books-bundle --quantize none --quantize int8
      edgelin export runs/books -o web-bundle --portable
      edgelin export hybrid --attention window=1024,sinks=4 --text held-out.txt
      edgelin export runs/books --quantize int4 --role head=int8 --calibrate held-out.txt
      edgelin export runs/books --quantize auto --budget 0.02 --calibrate held-out.txt
    """
    from edgelin.export.bundle import export_checkpoint
    from edgelin.runtimes.text_file import read_text

    choices = {
        "method": method,
        "budget": budget,
        "budget_kl": budget_kl,
        "budget_top1": budget_top1,
        "minimise": minimise,
    }

    report = export_checkpoint(
        checkpoint,
        output or _beside(checkpoint),
        quantise=(*quantize, "portable") if portable else quantize,
        profile=profile,
        force=force,
        attention=attention,
        text=None if text is None else read_text(text),
        streams=streams,
        roles=roles,
        calibration=_calibration(calibrate, {k: v for k, v in choices.items() if v is not None}),
    )
    click.echo(report.summary())


def _calibration(file: str | None, choices: dict[str, Any]) -> Calibration | None:
    """What the options about rounding on a text say."""
    if file is None:
        if choices:
            option = next(iter(choices)).replace("_", "-")
            raise EdgelinError(f"--{option} is about what is measured on a text; give --calibrate")
        return None
    from edgelin.export.quantise.plan import Calibration
    from edgelin.runtimes.text_file import read_text

    return Calibration(read_text(file), **choices)


def _beside(checkpoint: Path) -> Path:
    """CHECKPOINT-bundle, also where the path ends in a slash or in dots."""
    plain = checkpoint if checkpoint.name not in ("", "..") else Path(os.path.abspath(checkpoint))
    if not plain.name:
        raise EdgelinError(f"{checkpoint} has no name to call the bundle by; choose an --out")
    return plain.with_name(f"{plain.name}-bundle")
