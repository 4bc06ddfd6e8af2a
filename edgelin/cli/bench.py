"""``edgelin bench``: speed of a bundle, and step time and memory along a stream."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--tokens", default=4096, show_default=True, help="Tokens or steps of the stream.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write JSON here.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the stream (matplotlib).")
@click.option("--variant", help="Variant of the bundle; without it, the default one.")
@click.option("--threads", type=int, help="Without it, 1 and the number of physical cores.")
def command(
    bundle: Path,
    tokens: int,
    json_file: Path | None,
    plot: Path | None,
    variant: str | None,
    threads: int | None,
) -> None:
    """Measure tokens or steps a second of BUNDLE, and whether one stays as fast and as small.

    \b
    Examples:
      edgelin bench bundle
      edgelin bench bundle --tokens 100000 --json bench.json --plot bench.png
    """
    from edgelin.runtimes import checks, measure

    # Before a measurement that may take minutes.
    if json_file is not None:
        checks.target(json_file)
    if plot is not None:
        measure.check_plot(plot)
    found = measure.bench(bundle, tokens=tokens, threads=threads, variant=variant)
    # Files first: the reader of a pipe may be gone.
    if json_file is not None:
        measure.write_json(found, json_file)
    if plot is not None:
        measure.plot(found, f"{bundle.resolve().name}, {found['variant']}", plot)
    unit = f"{found['unit']}s"
    for row in found["speed"]:
        click.echo(
            f"{row['threads']} threads: decode {row[f'decode_{unit}_per_s']:.1f} {unit}/s, "
            f"prefill {row[f'prefill_{unit}_per_s']:.1f} {unit}/s"
        )
    growth = found["state_bytes_per_step"]
    grows = f", and {growth} more a {found['unit']}: not constant" if growth else ""
    click.echo(f"state: {found['state_bytes']} bytes{grows}")
    click.echo(f"{'position':>10}  {'step ms':>9}  {'RSS MiB':>9}")
    for point in found["series"]:
        rss = point["rss_bytes"] / 2**20
        click.echo(f"{point['position']:>10}  {point['step_ms']:>9.3f}  {rss:>9.1f}")
