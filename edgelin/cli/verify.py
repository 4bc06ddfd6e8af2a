"""``edgelin verify``: are all forms of a model the same model?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgelin.errors import EdgelinError
from edgelin.export.verify.report import TOLERANCE

if TYPE_CHECKING:
    from edgelin.sequences import Sequences


def _finite(
    context: click.Context, parameter: click.Parameter, value: float | None
) -> float | None:
    """The value, which no comparison could be beyond if it were nan or inf."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no finite number")
    return value


@click.command(name="verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Checkpoint that the bundle was made from; needs torch.",
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write all errors to this file."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    help="Largest relative error of a float form, at any position of any tensor.  [default: "
    f"{TOLERANCE:g}, or what float32 alone does to a deep model]",
)
@click.option(
    "--text",
    metavar="F",
    help="Compare quantised variants on this UTF-8 file (also .xz or .gz; - is stdin), not on a "
    "text that the float model writes.",
)
@click.option(
    "--features",
    metavar="F",
    type=click.Path(path_type=Path),
    help="The same for a model of features: an .npz of sequences (x, lengths).",
)
@click.option("--record", is_flag=True, help="Add the result to the report in the bundle.")
def command(
    bundle: Path,
    checkpoint: Path | None,
    json_path: Path | None,
    tolerance: float | None,
    text: str | None,
    features: Path | None,
    record: bool,
) -> None:
    """Check a BUNDLE: hashes, golden streams, and one form of the model beside another.

    With --checkpoint, the parallel form in torch and the graphs, fed step by step, in chunks and in
    calls of random lengths, stand beside the recurrence in float64; without, beside the graph's own
    steps. Every state must move the answers, and no row another one. Exits with 1 when an error is
    beyond the tolerance.

    \b
    Example:
      edgelin verify bundles/demo --checkpoint examples/demo/checkpoint --record
    """
    from edgelin.export.verify.compare import verify

    def progress(line: str) -> None:
        click.echo(line, err=True)

    result = verify(
        bundle,
        checkpoint,
        tolerance=tolerance,
        data=_data(bundle, text, features),
        progress=progress,
    )
    if json_path is not None:
        result.write(json_path)
    if record:
        from edgelin.export.verify.record import record as add_to_report

        add_to_report(result, bundle)
    click.echo(result.table())
    if not result.passed:
        raise EdgelinError(result.failure())
    click.echo(f"{bundle} is verified")


def _data(bundle: Path, text: str | None, features: Path | None) -> str | Sequences | None:
    """What quantised variants are compared on, which must be of the bundle's kind."""
    from edgelin.runtimes import feature_file
    from edgelin.runtimes.manifest import Manifest
    from edgelin.runtimes.text_file import read_text
    from edgelin.sequences import read_sequences

    manifest = Manifest.read(bundle)
    if features is not None:
        source = feature_file.check_features(manifest.input, bundle)
        config = feature_file.config_of(source, manifest.output)
        return read_sequences(features, config, scored=False)
    if text is not None and manifest.tokenizer is None:
        raise EdgelinError(f"{bundle} reads features, not text; give --features in place of --text")
    return None if text is None else read_text(text)
