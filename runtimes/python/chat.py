"""Dialogue in a model's own format: its chat template, rendered as transformers does.

The state carries the dialogue, so that a turn feeds only what is new: the end of the last reply,
the new text, and the beginning of the next reply. To find it, the template is rendered with a mark
in the place of the last reply, and what stands behind the mark is fed.

Templates come from checkpoints and are run by jinja2's sandbox. What a user says cannot become a
special token, whatever it spells.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgelin.errors import EdgelinError
from edgelin.runtimes.text import TextCodec, check_unicode
from edgelin.runtimes.tokenizer_record import TokenizerRecord

if TYPE_CHECKING:
    from edgelin.runtimes.session import Bundle

_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def turn(bundle: Bundle, text: str, *, system: str | None = None, first: bool = True) -> list[int]:
    """Token ids of the user's next turn, up to where the reply begins.

    Args:
        bundle: The model.
        text: What the user says.
        system: What the model is told before the first turn.
        first: Whether the dialogue begins; else the stream stands in the last reply.

    Raises:
        EdgelinError: The bundle has no chat template, the template refuses, or the text is empty.
    """
    if not text.strip():
        raise EdgelinError("the turn is empty; say something of at least one character")
    if system is not None and not first:
        raise EdgelinError("the dialogue has begun already; a system text comes before it")
    told = [] if system is None else [{"role": "system", "content": system}]
    return dialogue(bundle, [*told, {"role": "user", "content": text}], first=first)


def dialogue(
    bundle: Bundle, messages: Sequence[Mapping[str, str]], *, first: bool = True
) -> list[int]:
    """Token ids of a dialogue, up to where the next reply begins.

    Args:
        bundle: The model.
        messages: ``role`` and ``content`` of every turn.
        first: Whether the dialogue begins; else the stream stands in a reply before them.

    Raises:
        EdgelinError: The bundle has no chat template, or the template refuses.
    """
    template, record = template_of(bundle)
    words, mark = _Words(bundle.text, record.special_tokens), _unique()
    said = [{**message, "content": words.protect(message["content"])} for message in messages]
    if not first:
        said[:0] = [{"role": "user", "content": "."}, {"role": "assistant", "content": mark}]
    rendered = render(template, said, record.chat_tokens)
    if not first:
        if rendered.count(mark) != 1:
            raise EdgelinError(
                f"{template} does not show the last reply as it was; begin a new stream for every "
                f"turn"
            )
        rendered = rendered.partition(mark)[2]
    return words.encode(rendered)


def opening(bundle: Bundle, system: str) -> list[int]:
    """Token ids of what a chat model is told before the first turn; turns go on from there.

    They are the beginning of a first turn with this system text, up to what a later turn feeds.

    Raises:
        EdgelinError: The bundle has no chat template, or the template has no turn for a system text
            alone.
    """
    template, record = template_of(bundle)
    if not system.strip():
        raise EdgelinError("the system text is empty; say something of at least one character")
    words, mark, said = _Words(bundle.text, record.special_tokens), _unique(), _unique()
    user = {"role": "user", "content": said}
    told = [{"role": "system", "content": words.protect(system)}, user]
    later = [{"role": "user", "content": "."}, {"role": "assistant", "content": mark}, user]
    first, rest = (render(template, messages, record.chat_tokens) for messages in (told, later))
    turn = rest.partition(mark)[2]
    if said not in turn or not first.endswith(turn):
        raise EdgelinError(
            f"{template} puts the system text into the first turn, so it cannot be read alone; "
            "give --system to `edgelin run --chat`"
        )
    return words.encode(first.removesuffix(turn))


def template_of(bundle: Bundle) -> tuple[Path, TokenizerRecord]:
    """The chat template, and the tokenizer that it is for.

    Raises:
        EdgelinError: The bundle has none, or reads features.
    """
    record = bundle.manifest.tokenizer
    _ = bundle.text  # refuses a model of features
    if record is None or record.chat_template is None:
        raise EdgelinError(f"{bundle.path} has no chat template; give a plain prompt instead")
    return bundle.path / record.chat_template, record


def defaults(bundle: Bundle) -> dict[str, Any]:
    """Settings of the sampler that the model's authors recommend (``generation_config.json``)."""
    name = "generation_config.json"
    values = json.loads((bundle.path / name).read_bytes()) if name in bundle.manifest.files else {}
    if values.get("do_sample") is False:
        return {"temperature": 0.0}
    return {key: values[key] for key in _DEFAULTS if values.get(key) is not None}


def render(path: Path, messages: Sequence[Mapping[str, str]], tokens: Mapping[str, str]) -> str:
    """The text of a dialogue and the beginning of the model's reply.

    Args:
        path: The template.
        messages: ``role`` and ``content`` of every turn.
        tokens: Variables such as ``bos_token``.

    Raises:
        EdgelinError: The template has an error, or refuses the messages.
    """
    from jinja2 import TemplateError

    try:
        template = _environment().from_string(path.read_text(encoding="utf-8"))
        text: str = template.render(messages=list(messages), add_generation_prompt=True, **tokens)
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EdgelinError(f"{path} cannot be rendered: {reason}; use another prompt") from error
    return text


def fault(path: Path, tokens: Mapping[str, str]) -> str | None:
    """Why a template cannot show a dialogue of one turn and of two; None: it can."""
    turns = [{"role": role, "content": "Hello."} for role in ("user", "assistant", "user")]
    try:
        for said in (turns[:1], turns):
            render(path, said, tokens)
    except EdgelinError as error:
        return " ".join(str(error.__cause__).split())[:200]
    return None


def _environment() -> Any:
    """The sandbox and the functions that transformers gives a template."""
    from jinja2 import TemplateError, ext, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(ext.Extension):
        """``{% generation %}``, which marks replies in training, shows what is in it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            """Take the content."""
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), True)
            return body

    class PlainNamespace(Namespace):
        """``namespace()`` without names that Python itself uses."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a template must not set {name!r}")
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **settings)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["namespace"] = PlainNamespace
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Words:
    """Keeps what a user says apart from the special tokens of the template.

    Args:
        codec: The tokenizer.
        special: Special token text to id.
    """

    def __init__(self, codec: TextCodec, special: Mapping[str, int]) -> None:
        self._codec, self._special = codec, special
        self._cut = _unique()
        longest_first = sorted(special, key=len, reverse=True)
        names = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._names = re.compile(f"(?:{names})(?!{self._cut})")

    def protect(self, text: str) -> str:
        """The text with a mark in every special token that it spells."""
        return self._names.sub(lambda found: found[0][:1] + self._cut + found[0][1:], text)

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text; where a mark is, the user's own words."""
        check_unicode(text)
        if self._cut not in text:
            return self._codec.encode(text, start=False)
        ids: list[int] = []
        end = 0
        for found in self._names.finditer(text):
            ids += self._plain(text[end : found.start()])
            ids += self._codec.encode(found[0], start=False)
            end = found.end()
        return ids + self._plain(text[end:])

    def _plain(self, text: str) -> list[int]:
        """Ids without those of the special tokens that the text spells."""
        whole = text.replace(self._cut, "")
        spelled = {self._special[name] for name in self._names.findall(whole)}
        ids = self._codec.encode_plain(whole)
        if spelled.isdisjoint(ids):
            return ids
        # The vocabulary itself has the name as a word (Unigram does): have it spelled in two parts.
        parts = (self._codec.encode_plain(part) for part in text.split(self._cut))
        return [i for part in parts for i in part if i not in spelled]


def _unique() -> str:
    """Letters that no text has."""
    return f"\ue000{secrets.token_hex(8)}\ue001"


__all__ = ["defaults", "dialogue", "opening", "render", "template_of", "turn"]
