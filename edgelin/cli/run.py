"""``edgelin run``: write on from a prompt, or answer a stream of features."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from edgelin.errors import EdgelinError

if TYPE_CHECKING:
    from edgelin.runtimes.complete import Pace
    from edgelin.runtimes.sampler import Sampling
    from edgelin.runtimes.session import Bundle
    from edgelin.runtimes.stream import Stream


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--file", "file", metavar="F", help="Read the prompt from a UTF-8 file; - is stdin.")
@click.option("--max-tokens", default=256, show_default=True, help="Tokens to write at most.")
@click.option("--temperature", default=0.8, show_default=True, help="0: the likeliest token.")
@click.option("--top-k", default=40, show_default=True, help="Likeliest tokens kept; 0: all.")
@click.option("--top-p", default=0.95, show_default=True, help="Probability kept; 1: all.")
@click.option("--min-p", default=0.0, show_default=True, help="Least share of the best; 0: all.")
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1: repeat less.")
@click.option("--seed", type=int, help="Repeat the same text; without it, a new seed is drawn.")
@click.option("--stop", multiple=True, help="Text that ends the output; may be given often.")
@click.option("--features", metavar="F", help="Answer an .npy [time, F]; - reads lines of numbers.")
@click.option("--json", "as_json", is_flag=True, help="With --features: lines of JSON.")
@click.option("--stats", is_flag=True, help="Print speed, state size and memory to stderr.")
@click.option("--save-state", type=click.Path(path_type=Path), help="Write the state to a file.")
@click.option("--load-state", type=click.Path(path_type=Path), help="Go on from such a file.")
@click.option("--variant", help="Variant of the bundle; without it, the default one.")
@click.option("--threads", type=int, help="Without it, the number of physical cores.")
def command(
    bundle: Path,
    prompt: str | None,
    file: str | None,
    features: str | None,
    as_json: bool,
    stats: bool,
    save_state: Path | None,
    load_state: Path | None,
    variant: str | None,
    threads: int | None,
    **sampling: Any,
) -> None:
    """Write on from PROMPT, a file or standard input, in constant memory.

    The text goes to standard output as it comes. Ctrl-C ends it early; statistics and the state
    file are still written, and the exit code is 130; also when the reader of a pipe ends (141).

    A model of features prints a line a step: the class and its probability, or the numbers of a
    regression.

    \b
    Examples:
      edgelin run bundle "Once upon a time" --max-tokens 100 --stats
      edgelin run bundle --file long.txt --max-tokens 0 --save-state long.state
      edgelin run bundle --load-state long.state --temperature 0
      edgelin run bundle --features recording.npy
      sensor | edgelin run bundle --features - --save-state sensor.state
    """
    import edgelin
    from edgelin.runtimes import answer, checks, complete
    from edgelin.runtimes.sampler import Sampling

    _check_kind(features is not None, as_json, ["prompt", "file", *sampling])
    options = Sampling(**sampling)
    text = None if features is not None else _prompt(prompt, file, load_state is not None)
    if save_state is not None:
        checks.target(save_state)
    model = edgelin.load(bundle, variant=variant, threads=threads)
    stream = model.stream()
    if load_state is not None:
        stream.load(load_state)
    output = _Output()
    if features is not None:
        paces, interrupted = answer.answer(
            model, stream, features, as_json=as_json, emit=output.emit, failed=output.has_failed
        )
        if save_state is not None and stream.outputs is not None:
            stream.save(save_state)
    else:
        paces, interrupted = _write_on(model, stream, text, options, output, save_state)
    if stats:
        lines = complete.statistics(model, stream, paces)
        seed = [] if features is not None else [f"seed     {options.seed}"]
        click.echo("\n".join([*lines, *seed]), err=True)
    output.check()
    if interrupted:
        sys.exit(130)


def _check_kind(features: bool, as_json: bool, for_text: list[str]) -> None:
    """Refuse options for text with features, and the other way round."""
    if not features:
        if as_json:
            raise EdgelinError("--json needs --features; text is printed as it is")
        return
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is not ParameterSource.DEFAULT
        if name in for_text and given:
            shown = name.upper() if isinstance(parameter, click.Argument) else parameter.opts[-1]
            raise EdgelinError(f"{shown} is for text; leave it out with --features")


def _write_on(
    model: Bundle,
    stream: Stream,
    text: str | None,
    options: Sampling,
    output: _Output,
    save_state: Path | None,
) -> tuple[list[Pace], bool]:
    """Print what follows a text and save the state; returns as ``answer``."""
    from edgelin.runtimes import complete

    _ = model.text  # refuses a model of features
    with complete.interruptible() as interrupted:

        def ended() -> bool:
            return interrupted() or output.has_failed()

        paces = complete.complete(model, stream, text, options, emit=output.emit, interrupted=ended)
        if save_state is not None and stream.outputs is not None:
            stream.save(save_state)
        else:
            output.emit(stream.flush())
    if output.terminal:
        output.emit("\n")
    return paces, interrupted()


def _prompt(prompt: str | None, file: str | None, loaded: bool) -> str | None:
    """The text to read first; None to go on from a loaded state."""
    from edgelin.runtimes.text_file import read_text

    if prompt is not None and file is not None:
        raise click.UsageError("give PROMPT or --file, not both")
    if prompt is None and file is None:
        if loaded:
            return None
        if sys.stdin is not None and sys.stdin.isatty():
            raise click.UsageError("give PROMPT, --file, or text on standard input; or --features")
        file = "-"
    text = read_text(file) if file is not None else prompt
    if not text:
        raise EdgelinError("the prompt is empty; give text of at least one character")
    return text


class _Output:
    """Standard output that notes its failure, so that the state can still be saved.

    Attributes:
        terminal: Whether a person reads along.
        failure: What went wrong; later text is dropped.
    """

    def __init__(self) -> None:
        self.terminal = sys.stdout is not None and sys.stdout.isatty()
        self.failure: OSError | None = None

    def emit(self, piece: str) -> None:
        """Print a piece of text at once; into a pipe or file as UTF-8, whatever the locale is."""
        if not piece or self.failure is not None:
            return
        try:
            click.echo(piece if self.terminal else piece.encode(), nl=False)
        except OSError as error:
            self.failure = error
            # Python flushes what is left in the buffer when it ends, and would fail again.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)

    def has_failed(self) -> bool:
        """Whether nobody gets what is printed from here on."""
        return self.failure is not None

    def check(self) -> None:
        """End as a shell expects of a program whose output failed."""
        if isinstance(self.failure, BrokenPipeError):
            sys.exit(128 + 13)  # as if by SIGPIPE
        if self.failure is not None:
            reason = self.failure.strerror or self.failure
            raise EdgelinError(f"standard output cannot be written: {reason}")
