"""``edgelin serve``: a bundle behind OpenAI's API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from edgelin.runtimes.server.process import Server


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", default=8000, show_default=True, help="0: any free one.")
@click.option("--api-key", help="What clients must show; or in the env.")
@click.option("--slots", default=8, show_default=True, help="Texts written at the same time.")
@click.option("--queue", default=64, show_default=True, help="Texts that may wait for a slot.")
@click.option("--sessions", default=32, show_default=True, help="Conversations that are kept.")
@click.option("--state-dtype", default="float32", show_default=True, help="float16, int8: less.")
@click.option("--prompt-tokens", default=16384, show_default=True, help="Longest prompt.")
@click.option("--max-tokens", default=4096, show_default=True, help="Longest text.")
@click.option("--grace", default=10, show_default=True, help="Seconds for texts at the end.")
@click.option("--variant", help="Variant of the bundle; without it, the default one.")
@click.option("--threads", type=int, help="Without it, the number of physical cores.")
def command(
    bundle: Path,
    host: str,
    port: int,
    api_key: str | None,
    state_dtype: str,
    variant: str | None,
    threads: int | None,
    **limits: Any,
) -> None:
    """Answer OpenAI's completions and chat completions with BUNDLE, many clients at once.

    A client's session_id keeps its state between calls: only what is new is sent and read. SIGTERM
    or Ctrl-C lets what runs end first, for --grace seconds; a second one cuts it.

    \b
    Examples:
      edgelin serve bundle
      EDGELIN_API_KEY=secret edgelin serve bundle --host 0.0.0.0 --port 80
    """
    import edgelin
    from edgelin.runtimes.server.guard import is_local
    from edgelin.runtimes.server.limits import Limits
    from edgelin.runtimes.server.process import serve

    bounds = Limits(**limits)
    if api_key is None:  # click takes an empty variable for none, which would open the server
        api_key = os.environ.get("EDGELIN_API_KEY")

    def ready(address: str, server: Server) -> None:
        click.echo(f"{bundle.resolve().name} at {address}/v1, {bounds.slots} slots; Ctrl-C ends it")

    if api_key is None and not is_local(host):
        click.echo(f"Warning: whoever reaches {host} can use it; give --api-key", err=True)
    model = edgelin.load(bundle, variant=variant, threads=threads)
    serve(
        model, bounds, host=host, port=port, api_key=api_key, state_dtype=state_dtype,
        ready=ready,
    )  # fmt: skip
