"""``edgelin soak``: a long stream, and what becomes of states, memory and precision on it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgelin.errors import EdgelinError

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--tokens",
    default=1_000_000,
    show_default=True,
    help="Length of the stream, in tokens or steps.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("soak"),
    show_default=True,
    help="Folder of the report and of all that is needed to go on.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="What the bundle was made from: its float64 model reads the same (needs torch).",
)
@click.option("--text", metavar="F", help="Read this UTF-8 file, repeated; else random tokens.")
@click.option(
    "--features",
    metavar="F",
    type=click.Path(path_type=Path),
    help="The same for a model of features: an .npz of sequences.",
)
@click.option("--one-by-one", is_flag=True, help="Feed one step a call: slower, the same numbers.")
@click.option("--variant", help="Variant of the bundle; without it, the default one.")
@click.option("--threads", type=int, help="Without it, the number of physical cores.")
def command(
    bundle: Path,
    tokens: int,
    out: Path,
    checkpoint: Path | None,
    text: str | None,
    features: Path | None,
    one_by_one: bool,
    variant: str | None,
    threads: int | None,
) -> None:
    """Stream a million tokens through BUNDLE and report on states, memory, step time and drift.

    Writes soak.json, soak.md and (with matplotlib) soak.png. Ctrl-C keeps all; the same command
    goes on, also with more --tokens. Exits with 1 where a value is not finite, memory grows, or the
    distance from the float64 model does.

    \b
    Examples:
      edgelin soak bundle --text held-out.txt
      edgelin soak bundle --text held-out.txt --checkpoint checkpoint -o runs/soak
    """
    import edgelin
    from edgelin.runtimes.soak import Soak
    from edgelin.stop import Stop

    opened = edgelin.load(bundle, variant=variant, threads=threads)
    source = _source(opened, text, features)
    soak = Soak(opened, source, out, one_by_one=one_by_one)
    found = None
    with Stop() as stop:
        soak.run(tokens, lambda: stop.asked)
        if checkpoint is not None and not stop.asked and soak.progress.points:
            from edgelin.export.soak_reference import distances

            at = [point.position for point in soak.progress.points]
            found = distances(opened, checkpoint, source, out, at, lambda: stop.asked)
    report = _report(opened, soak, found, out)
    if stop.asked:
        click.echo(f"Stopped, all is kept in {out}; the same command goes on", err=True)
        sys.exit(130)
    click.echo(report.text())
    if not report.passed:
        raise EdgelinError(f"{report.failure()}; see {out / 'soak.md'}")


def _source(bundle: Bundle, text: str | None, features: Path | None) -> Any:
    """What the stream reads."""
    from edgelin.runtimes import feature_file
    from edgelin.runtimes.soak import Source
    from edgelin.runtimes.text_file import read_text
    from edgelin.sequences import read_sequences

    if features is not None:
        given = feature_file.check_features(bundle.manifest.input, bundle.path)
        config = feature_file.config_of(given, bundle.manifest.output)
        return Source.of(bundle, read_sequences(features, config, scored=False).x, features.name)
    if text is not None:
        steps = bundle.text.encode(read_text(text), start=True)
        return Source.of(bundle, steps, Path(text).name)
    return Source.of(bundle, None, "")


def _report(bundle: Bundle, soak: Any, found: Any, out: Path) -> Any:
    """Write the report, as far as it is known, and draw it if that can be."""
    from dataclasses import asdict
    from importlib.util import find_spec

    from edgelin.runtimes.soak_report import SoakReport, plot

    distances = None if found is None else [asdict(distance) for distance in found]
    report = SoakReport(bundle.path, bundle.manifest, soak.progress, distances)
    report.write(out)
    if find_spec("matplotlib") is not None and soak.progress.points:
        plot(report, out / "soak.png")
    return report
