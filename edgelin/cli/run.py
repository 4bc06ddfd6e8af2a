"""``edgelin run``: write on from a prompt, talk, or answer a stream of features."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edgelin.cli._output import Output
from edgelin.errors import EdgelinError


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--file", "file", metavar="F", help="Read the prompt from a UTF-8 file; - is stdin.")
@click.option("--chat", is_flag=True, help="Talk in the model's own format; PROMPT is a turn.")
@click.option("--system", metavar="TEXT", help="With --chat: what the model is told first.")
@click.option("--max-tokens", default=256, show_default=True, help="Tokens to write at most.")
@click.option("--temperature", default=0.8, show_default=True, help="0: the likeliest token.")
@click.option("--top-k", default=40, show_default=True, help="Likeliest tokens kept; 0: all.")
@click.option("--top-p", default=0.95, show_default=True, help="Probability kept; 1: all.")
@click.option("--min-p", default=0.0, show_default=True, help="Least share of the best; 0: all.")
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1: repeat less.")
@click.option("--seed", type=int, help="Repeat the same text; without it, a new seed is drawn.")
@click.option("--stop", multiple=True, help="Text that ends the output; may be given often.")
@click.option("--lookup", default=0, show_default=True, help="With --temperature 0: guess so far.")
@click.option("--features", metavar="F", help="Answer an .npy [time, F]; - reads lines of numbers.")
@click.option("--json", "as_json", is_flag=True, help="With --features: lines of JSON.")
@click.option("--stats", is_flag=True, help="Print speed, state size and memory to stderr.")
@click.option("--save-state", type=click.Path(path_type=Path), help="Write the state to a file.")
@click.option("--state-dtype", default="float32", show_default=True, help="float16, int8: less.")
@click.option("--load-state", type=click.Path(path_type=Path), help="Go on from such a file.")
@click.option("--capsule", metavar="NAME", help="Begin in a capsule of the bundle; none: in none.")
@click.option("--variant", help="Variant of the bundle; without it, the default one.")
@click.option("--threads", type=int, help="Without it, the number of physical cores.")
def command(
    bundle: Path,
    prompt: str | None,
    file: str | None,
    chat: bool,
    system: str | None,
    features: str | None,
    as_json: bool,
    stats: bool,
    save_state: Path | None,
    state_dtype: str,
    load_state: Path | None,
    capsule: str | None,
    variant: str | None,
    threads: int | None,
    **sampling: Any,
) -> None:
    """Write on from PROMPT, a file or standard input, in constant memory.

    The text goes to standard output as it comes. Ctrl-C ends it early; statistics and the state
    file are still written, and the exit code is 130; also when the reader of a pipe ends (141).

    With --chat, PROMPT is said to the model in the format that it was trained on; without PROMPT, a
    dialogue begins in which the state keeps all that was said (Ctrl-D ends it).

    A model of features prints a line a step: the class and its probability, or the numbers of a
    regression.

    \b
    Examples:
      edgelin run bundle "Once upon a time" --max-tokens 100 --stats
      edgelin run bundle --file long.txt --max-tokens 0 --save-state long.state
      edgelin run bundle --load-state long.state --temperature 0
      edgelin run bundle --capsule sys "How are you?"
      edgelin run bundle --chat "What is a river?" --system "Answer in one sentence."
      edgelin run bundle --features recording.npy
      sensor | edgelin run bundle --features - --save-state sensor.state
    """
    import edgelin
    from edgelin.runtimes import answer, checks, complete, state_codec, writer
    from edgelin.runtimes.sampler import Sampling

    _check_kind(features is not None, as_json, ["prompt", "file", "chat", "system", *sampling])
    if system is not None and not chat:
        raise EdgelinError("--system needs --chat; put it into the prompt instead")
    if load_state is not None and capsule is not None:
        raise EdgelinError("give --load-state or --capsule, not both: either says where to begin")
    if save_state is None and _given(["state_dtype"]):
        raise EdgelinError("--state-dtype needs --save-state, the file that it is for")
    state_codec.check(state_dtype)
    options = Sampling(**sampling)
    dialogue = chat and prompt is None and file is None and _at_terminal()
    text = None
    if features is None and not dialogue:
        text = _prompt(prompt, file, (load_state or capsule) is not None and not chat)
    if save_state is not None:
        checks.target(save_state)
    model = edgelin.load(bundle, variant=variant, threads=threads)
    stream = model.stream(capsule=capsule if load_state is None else "none")
    if load_state is not None:
        stream.load(load_state)
    output = Output()
    if features is not None:
        try:
            paces, interrupted = answer.answer(
                model, stream, features, as_json=as_json, emit=output.emit, failed=output.has_failed
            )
        finally:  # a line that cannot be read ends the stream; what was answered before it counts
            if save_state is not None and stream.outputs is not None:
                stream.save(save_state, dtype=state_dtype)
    else:
        end = "\n" if output.terminal else ""
        write = writer.Writer(
            model, stream, options, output.emit, output.has_failed, save_state, state_dtype, end
        )
        if chat:
            write.recommend(_given(sampling))
            turns = writer.typed_lines() if dialogue else iter([text or ""])
            paces, interrupted = write.talk(turns, system)
        else:
            paces, interrupted = write.write_on(text)
    if stats:
        lines = complete.statistics(model, stream, paces)
        seed = [] if features is not None else [f"seed     {options.seed}"]
        click.echo("\n".join([*lines, *seed]), err=True)
    output.check()
    if interrupted and not dialogue:
        sys.exit(130)


def _check_kind(features: bool, as_json: bool, for_text: list[str]) -> None:
    """Refuse options for text with features, and the other way round."""
    if not features:
        if as_json:
            raise EdgelinError("--json needs --features; text is printed as it is")
        return
    given = _given(for_text)
    for parameter in click.get_current_context().command.params:
        if parameter.name in given:
            shown = parameter.opts[-1]
            shown = shown.upper() if isinstance(parameter, click.Argument) else shown
            raise EdgelinError(f"{shown} is for text; leave it out with --features")


def _given(names: Iterable[str]) -> list[str]:
    """Those of the options that stand on the command line."""
    source = click.get_current_context().get_parameter_source
    return [name for name in names if source(name) is not ParameterSource.DEFAULT]


def _at_terminal() -> bool:
    """Whether a person can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()


def _prompt(prompt: str | None, file: str | None, loaded: bool) -> str | None:
    """The text to read first; None to go on from a loaded state."""
    from edgelin.runtimes.text_file import read_text

    if prompt is not None and file is not None:
        raise click.UsageError("give PROMPT or --file, not both")
    if prompt is None and file is None:
        if loaded:
            return None
        if _at_terminal():
            raise click.UsageError("give PROMPT, --file, or text on standard input; or --features")
        file = "-"
    text = read_text(file) if file is not None else prompt
    if not text:
        raise EdgelinError("the prompt is empty; give text of at least one character")
    return text
