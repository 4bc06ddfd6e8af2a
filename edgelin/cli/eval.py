"""``edgelin eval``: bits per byte on a text, accuracy on features, distance to another bundle."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgelin.errors import EdgelinError

if TYPE_CHECKING:
    from edgelin.runtimes.evaluate import Quality
    from edgelin.runtimes.evaluate_features import FeatureQuality
    from edgelin.runtimes.session import Bundle


@click.command()
@click.argument("model", metavar="BUNDLE_OR_CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--text", metavar="F", help="UTF-8 text, also .xz or .gz; - is stdin.")
@click.option("--features", metavar="F", help="An .npz of sequences: x, lengths and answers y.")
@click.option("--against", type=click.Path(path_type=Path), help="Bundle to compare with.")
@click.option("--variant", help="Variant of BUNDLE; without it, the default one.")
@click.option("--against-variant", help="Variant of the other bundle.")
@click.option("--max-tokens", type=int, help="Read only the first tokens of the text.")
@click.option("--by-position", type=int, metavar="N", help="Read the text in streams of N tokens.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw --by-position (matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: Path,
    text: str | None,
    features: str | None,
    against: Path | None,
    variant: str | None,
    against_variant: str | None,
    max_tokens: int | None,
    by_position: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure a model on a text that is read as one stream, or on sequences of features.

    Prints bits per UTF-8 byte; of features, accuracy or mean squared error. With --against also the
    mean KL divergence from the other bundle (in nat) and how often both rank the same token or
    class first. With --by-position the text is cut into streams that begin anew, and bits per byte
    are told by position: take N far beyond the sequences of the training.

    \b
    Examples:
      edgelin eval bundle --text held-out.txt
      edgelin eval bundle --variant model_q4 --against bundle --against-variant model --text t.xz
      edgelin eval checkpoint --text held-out.txt --json
      edgelin eval bundle --features held-out.npz
      edgelin eval bundle --text held-out.txt --by-position 32768 --plot positions.png
    """
    if (text is None) == (features is None):
        raise EdgelinError("give either --text or --features, as the model reads")
    if against_variant is not None and against is None:
        raise EdgelinError("--against-variant needs --against, the bundle to compare with")
    if features is not None and max_tokens is not None:
        raise EdgelinError("--max-tokens is for text; leave it out with --features")
    if plot is not None and by_position is None:
        raise EdgelinError("--plot draws --by-position; give both")
    is_checkpoint = _is_checkpoint(model)
    if is_checkpoint and (against is not None or variant is not None):
        raise EdgelinError(f"{model} is a checkpoint; --against and --variant need a bundle")
    if by_position is not None:
        if is_checkpoint or against is not None or text is None:
            raise EdgelinError("--by-position reads a --text with one bundle, without --against")
        _by_position(model, variant, _read(text), by_position, max_tokens, plot, as_json)
        return
    content = None if text is None else _read(text)
    quality: Quality | FeatureQuality
    if is_checkpoint:
        quality = _of_checkpoint(model, content, features, max_tokens)
    else:
        import edgelin

        other = None if against is None else edgelin.load(against, variant=against_variant)
        bundle = edgelin.load(model, variant=variant)
        quality = _of_bundle(bundle, other, content, features, max_tokens)
    found = {key: value for key, value in asdict(quality).items() if value is not None}
    if as_json:
        click.echo(json.dumps(found))
        return
    for key, value in found.items():
        click.echo(f"{key:<21}  {value:.6g}" if isinstance(value, float) else f"{key:<21}  {value}")


def _by_position(
    folder: Path,
    variant: str | None,
    text: str,
    length: int,
    max_tokens: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure, draw and print bits per byte by position."""
    import edgelin
    from edgelin.runtimes import evaluate_positions, measure

    if plot is not None:
        measure.check_plot(plot)
    bundle = edgelin.load(folder, variant=variant)
    spans = evaluate_positions.by_position(bundle, text, length, max_tokens=max_tokens)
    if plot is not None:
        title = f"{folder.resolve().name}, {bundle.variant}: {spans[0].streams} streams"
        evaluate_positions.plot(spans, title, plot)
    if as_json:
        click.echo(json.dumps([asdict(span) for span in spans]))
        return
    click.echo("positions          bits per byte")
    for span in spans:
        error = "" if span.standard_error is None else f" +- {span.standard_error:.4f}"
        click.echo(f"{f'{span.first}-{span.last}':<17}  {span.bits_per_byte:.4f}{error}")


def _read(text: str) -> str:
    """The text of a file."""
    from edgelin.runtimes.text_file import read_text

    return read_text(text)


def _of_checkpoint(
    folder: Path, text: str | None, features: str | None, max_tokens: int | None
) -> Quality | FeatureQuality:
    """Measure a model in torch."""
    from edgelin.families import convert
    from edgelin.runtimes import evaluate, evaluate_features

    with convert.own(folder) as own:
        if features is not None:
            return evaluate_features.evaluate_checkpoint(own, Path(features))
        return evaluate.evaluate_checkpoint(own, text or "", max_tokens=max_tokens)


def _of_bundle(
    bundle: Bundle,
    other: Bundle | None,
    text: str | None,
    features: str | None,
    max_tokens: int | None,
) -> Quality | FeatureQuality:
    """Measure a bundle."""
    from edgelin.runtimes import evaluate, evaluate_features

    if features is not None:
        return evaluate_features.evaluate(bundle, Path(features), against=other)
    return evaluate.evaluate(bundle, text or "", against=other, max_tokens=max_tokens)


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, ours or another project's, and no bundle."""
    if (folder / "edgelin.json").exists():
        return False
    return (folder / "config.json").is_file() or any(folder.glob("*.pth"))
