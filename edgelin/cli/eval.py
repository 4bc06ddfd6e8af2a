"""``edgelin eval``: bits per byte on a text, and the distance to another bundle."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from edgelin.errors import EdgelinError


@click.command()
@click.argument("model", metavar="BUNDLE_OR_CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--text", required=True, metavar="F", help="UTF-8 text, also .xz or .gz; - is stdin.")
@click.option("--against", type=click.Path(path_type=Path), help="Bundle to compare with.")
@click.option("--variant", help="Variant of BUNDLE; without it, the default one.")
@click.option("--against-variant", help="Variant of the other bundle.")
@click.option("--max-tokens", type=int, help="Read only the first tokens of the text.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: Path,
    text: str,
    against: Path | None,
    variant: str | None,
    against_variant: str | None,
    max_tokens: int | None,
    as_json: bool,
) -> None:
    """Measure a model on a text that is read as one stream.

    Prints bits per UTF-8 byte. With --against also the mean KL divergence from the other bundle
    (in nat) and how often both rank the same token first.

    \b
    Examples:
      edgelin eval bundle --text held-out.txt
      edgelin eval bundle --variant model_q4 --against bundle --against-variant model --text t.xz
      edgelin eval checkpoint --text held-out.txt --json
    """
    import edgelin
    from edgelin.runtimes import evaluate
    from edgelin.runtimes.text_file import read_text

    if against_variant is not None and against is None:
        raise EdgelinError("--against-variant needs --against, the bundle to compare with")
    content = read_text(text)
    if _is_checkpoint(model):
        if against is not None or variant is not None:
            raise EdgelinError(f"{model} is a checkpoint; --against and --variant need a bundle")
        quality = evaluate.evaluate_checkpoint(model, content, max_tokens=max_tokens)
    else:
        other = edgelin.load(against, variant=against_variant) if against is not None else None
        bundle = edgelin.load(model, variant=variant)
        quality = evaluate.evaluate(bundle, content, against=other, max_tokens=max_tokens)
    found = {key: value for key, value in asdict(quality).items() if value is not None}
    if as_json:
        click.echo(json.dumps(found))
        return
    for key, value in found.items():
        click.echo(f"{key:<21}  {value:.6g}" if isinstance(value, float) else f"{key:<21}  {value}")


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of edgelin and no bundle."""
    if (folder / "edgelin.json").exists():
        return False
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "edgelin"
