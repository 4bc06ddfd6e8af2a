"""``edgelin prompt``: read a prompt once, and keep the state behind it."""

from __future__ import annotations

from pathlib import Path

import click

from edgelin.errors import EdgelinError


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("text", required=False)
@click.option("--file", "file", metavar="F", help="Read the text from a UTF-8 file; - is stdin.")
@click.option("--chat", is_flag=True, help="TEXT is what a chat model is told first.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="State file to write.")
@click.option("--name", help="Keep the state in the bundle, as a capsule of this name.")
@click.option("--default", is_flag=True, help="With --name: streams begin there unless told.")
@click.option("--remove", metavar="NAME", help="Take a capsule out of the bundle instead.")
@click.option("--state-dtype", default="float32", show_default=True, help="float16, int8: less.")
@click.option("--variant", help="Variant of the bundle; without it, the default one.")
@click.option("--threads", type=int, help="Without it, the number of physical cores.")
def command(
    bundle: Path,
    text: str | None,
    file: str | None,
    chat: bool,
    out: Path | None,
    name: str | None,
    default: bool,
    remove: str | None,
    state_dtype: str,
    variant: str | None,
    threads: int | None,
) -> None:
    """Read TEXT once and keep the state behind it, from which streams go on at once.

    The state goes to a file (--out), for `edgelin run BUNDLE --load-state FILE`, or into the bundle
    (--name), for `edgelin run BUNDLE --capsule NAME`. Going on from it gives the same tokens as
    reading the text again. A new export of the bundle begins without capsules.

    \b
    Examples:
      edgelin prompt bundle "Once upon a time" -o once.state
      edgelin prompt bundle --file rules.txt --name rules --default
      edgelin prompt chat-model --chat "Answer in one sentence." --name brief
      edgelin prompt bundle --remove rules
    """
    import edgelin
    from edgelin.runtimes import capsules, checks, state_codec
    from edgelin.runtimes.text_file import read_text

    given = [value for value in (text, file, remove) if value is not None]
    if len(given) != 1:
        raise click.UsageError("give TEXT, --file or --remove, and only one of them")
    if remove is not None:
        capsules.remove(bundle, remove)
        return
    if (out is None) == (name is None):
        raise click.UsageError("give either --out or --name")
    if default and name is None:
        raise EdgelinError("--default needs --name, the capsule in which streams begin")
    state_codec.check(state_dtype)
    if out is not None:
        checks.target(out)
    if name is not None:
        capsules.check_name(name)
    prompt = text if file is None else read_text(file)
    model = edgelin.load(bundle, variant=variant, threads=threads)
    stream = capsules.read_prompt(model, prompt or "", as_system=chat)
    if out is not None:
        stream.save(out, dtype=state_dtype)
    else:
        out = bundle / model.add_capsule(name or "", stream, default=default, dtype=state_dtype)
    click.echo(f"{out}: {stream.position} tokens, {out.stat().st_size} bytes")
