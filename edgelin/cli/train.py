"""``edgelin train``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from edgelin.errors import EdgelinError


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Output folder [runs/<config name>].")
@click.option(
    "--init",
    type=click.Path(path_type=Path),
    help="Begin with the weights and the tokenizer of this checkpoint.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in the output folder.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to train; auto takes a CUDA GPU if there is one.",
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a setting.")
def command(
    config: Path,
    out: Path | None,
    init: Path | None,
    resume: bool,
    device: str,
    settings: tuple[str, ...],
) -> None:
    """Train the model that the TOML file CONFIG describes.

    Ctrl-C finishes the step and saves; --resume goes on from there. With --init, CONFIG may leave
    out the table "model"; `edgelin import` makes such a checkpoint of another project's.

    \b
    Examples:
      edgelin train examples/demo/config.toml --out runs/demo --set optim.steps=100
      edgelin train tune.toml --init examples/demo/checkpoint --out runs/tuned
    """
    from edgelin.config import load_run

    run = None if init is not None else load_run(config, settings)
    try:
        from edgelin import checkpoint
        from edgelin.train.loop import train
    except ModuleNotFoundError as error:
        raise EdgelinError(
            f"training needs {error.name}: pip install 'edgelin[train]', "
            f"in a checkout: pip install -c constraints.txt -e '.[train]'"
        ) from error

    if init is not None:
        run = load_run(config, settings, model=checkpoint.read_config(init))
    assert run is not None
    out = out or Path("runs") / config.stem
    result = train(run, out, resume=resume, device=device, init=init)
    if result.interrupted:
        words = ["edgelin", "train", str(config), "--out", str(out), "--resume"]
        words += [] if init is None else ["--init", str(init)]
        words += [] if device == "auto" else ["--device", device]
        words += [word for setting in settings for word in ("--set", setting)]
        click.echo(
            f"Stopped after step {result.step}, all is saved. Go on with: {shlex.join(words)}",
            err=True,
        )
        sys.exit(130)
    held_out = ""
    if result.score is not None:
        held_out = f", held-out {result.score:.4f} {result.metric.replace('_', ' ')}"
    click.echo(f"{out}: {result.step} steps{held_out}")
