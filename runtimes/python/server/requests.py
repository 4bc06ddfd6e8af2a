"""Reading a request: what is computed, what is harmless, and what is refused by its name.

A field that would change the answer and is not computed is refused; so is every field that is not
known. Null stands for a field that is not given, as OpenAI's clients send it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgelin.errors import EdgelinError
from edgelin.runtimes import checks
from edgelin.runtimes.sampler import Sampling
from edgelin.runtimes.server.errors import ApiError

_SAMPLING = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop",
)  # fmt: skip
_OWN = (
    "model", "prompt", "messages", "max_completion_tokens", "n", "stream", "stream_options",
    "session_id", "session_position",
)  # fmt: skip
# They change what is billed, stored or counted, not what is written.
_HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction",
})  # fmt: skip
# Values with which a field that is not computed changes nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_STOPS, _STOP_LENGTH = 16, 256
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Call:
    """A request that can be answered.

    Args:
        prompts: Texts or token ids to write on from; of a chat, one empty text.
        messages: The dialogue of a chat; None: it is no chat.
        sampling: How to write.
        n: Texts for every prompt.
        stream: Whether text is sent as it comes.
        include_usage: Whether a stream ends with the numbers of tokens.
        session: Id of the session.
        position: Where the client believes the session to stand.
    """

    prompts: list[str | list[int]]
    messages: list[dict[str, str]] | None
    sampling: Sampling
    n: int
    stream: bool
    include_usage: bool
    session: str | None
    position: int | None

    def choice(self, index: int) -> Sampling:
        """How the index-th text of a prompt is written: with a seed of its own."""
        assert self.sampling.seed is not None
        return replace(self.sampling, seed=(self.sampling.seed + index) % 2**64)


def parse(
    body: bytes, *, chat: bool, model: str, defaults: Mapping[str, Any], header: str | None
) -> Call:
    """Read and check the body of a request.

    Args:
        body: JSON.
        chat: Whether it is of ``/v1/chat/completions``.
        model: Name of the model that is served.
        defaults: Settings of the sampler where the request has none.
        header: The session's id as the header has it.

    Raises:
        ApiError: Something is wrong, unknown, or not computed.
    """
    fields = _fields(body)
    try:
        return _call(fields, chat=chat, model=model, defaults=defaults, header=header)
    except EdgelinError as error:  # begins with the name of what is out of range
        name = str(error).partition(" ")[0]
        raise ApiError(400, str(error), param=name if name in fields else None) from None


def _call(
    fields: dict[str, Any], *, chat: bool, model: str, defaults: Mapping[str, Any],
    header: str | None,
) -> Call:  # fmt: skip
    """The request of these fields."""
    _refuse_others(fields, chat)
    if fields.get("model", model) != model:
        raise ApiError(
            404, f"model is {fields['model']!r}; this server has {model!r}",
            param="model", code="model_not_found",
        )  # fmt: skip
    n = checks.positive("n", fields.get("n", 1))
    stream = _flag(fields, "stream")
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or (options and not stream):
        raise ApiError(
            400, "stream_options is for streams, an object such as {'include_usage': true}",
            param="stream_options",
        )  # fmt: skip
    session, position = _session(fields, header, n)
    messages = _messages(fields) if chat else None
    prompts: list[str | list[int]] = [""] if chat else _prompts(fields)
    if session is not None and len(prompts) > 1:
        raise ApiError(400, "a session goes on from one prompt; give one", param="prompt")
    return Call(
        prompts=prompts,
        messages=messages,
        sampling=_sampling(fields, defaults),
        n=n,
        stream=stream,
        include_usage=_flag(options, "include_usage"),
        session=session,
        position=position,
    )


def _fields(body: bytes) -> dict[str, Any]:
    """The fields that are given."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is no JSON; send an object in UTF-8") from None
    if not isinstance(content, dict):
        raise ApiError(400, "the body is no JSON object; send one with model and prompt")
    return {name: value for name, value in content.items() if value is not None}


def _refuse_others(fields: Mapping[str, Any], chat: bool) -> None:
    """Refuse fields that would change the answer, or might."""
    for name, value in fields.items():
        if name in _HARMLESS or name in _SAMPLING or name in _OWN:
            if name == ("prompt" if chat else "messages"):
                path = "/v1/completions" if chat else "/v1/chat/completions"
                raise ApiError(400, f"{name} is for {path}", param=name)
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is None:
            raise ApiError(400, f"{name} is not known here; leave it out", param=name)
        # True is no 1 here, and False no 0.
        if not any(value == good and type(value) in (type(good), float) for good in neutral):
            raise ApiError(400, f"{name} is not supported here; leave it out", param=name)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false."""
    value = fields.get(name)
    if not (value is None or isinstance(value, bool)):
        raise ApiError(400, f"{name} is {value!r}; allowed: true or false", param=name)
    return bool(value)


def _sampling(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sampling:
    """Settings of the sampler."""
    given = {name: fields[name] for name in _SAMPLING if name in fields}
    if "max_completion_tokens" in fields:
        given["max_tokens"] = fields["max_completion_tokens"]
    sampling = Sampling(**{**defaults, **given})
    if len(sampling.stop) > _STOPS or any(len(stop) > _STOP_LENGTH for stop in sampling.stop):
        raise ApiError(
            400, f"stop has at most {_STOPS} texts of at most {_STOP_LENGTH} characters",
            param="stop",
        )  # fmt: skip
    return sampling


def _session(
    fields: Mapping[str, Any], header: str | None, n: int
) -> tuple[str | None, int | None]:
    """Id and position of the session."""
    name, position = fields.get("session_id", header), fields.get("session_position")
    if name is None:
        if position is not None:
            raise ApiError(400, "session_position needs session_id", param="session_position")
        return None, None
    if header not in (None, name):
        raise ApiError(400, "session_id and its header differ; give one", param="session_id")
    if not isinstance(name, str) or re.fullmatch(r"[!-~]{1,128}", name) is None:
        raise ApiError(
            400, f"session_id is {name!r}; allowed: 1 to 128 of ASCII's visible characters",
            param="session_id",
        )  # fmt: skip
    if n != 1:
        raise ApiError(400, "a session goes on with one text; n must be 1", param="n")
    if position is not None:
        position = checks.integer("session_position", position, "0 or more")
    return name, position


def _prompts(fields: Mapping[str, Any]) -> list[str | list[int]]:
    """Every prompt of a completion; what ids are allowed, the model says."""
    prompt = fields.get("prompt", "")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(part) is int for part in prompt):
            return [prompt]
        if all(isinstance(part, str) for part in prompt):
            return prompt
        if all(isinstance(p, list) and p and all(type(i) is int for i in p) for p in prompt):
            return prompt
    raise ApiError(
        400, "prompt is neither text, nor token ids, nor a list of either", param="prompt"
    )


def _messages(fields: Mapping[str, Any]) -> list[dict[str, str]]:
    """Role and text of every message."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages is no list of messages; give at least one", param="messages")
    found = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    if found[-1]["role"] != "user" or not found[-1]["content"].strip():
        raise ApiError(
            400, "the last message must be a user's, and say something", param="messages"
        )
    return found


def _message(message: Any, where: str) -> dict[str, str]:
    """Role and text of one message."""
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} is no object with role and content", param="messages")
    given = {name: value for name, value in message.items() if value not in (None, [])}
    role = _ROLES.get(given.pop("role", None)) if isinstance(message.get("role"), str) else None
    if role is None:
        allowed = ", ".join(_ROLES)
        raise ApiError(
            400, f"{where}.role is {message.get('role')!r}; allowed: {allowed}", param="messages"
        )
    content = given.pop("content", "")
    if isinstance(content, list):
        content = "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content is no text", param="messages")
    if given:
        raise ApiError(
            400, f"{where}.{next(iter(given))} is not supported; leave it out", param="messages"
        )
    return {"role": role, "content": content}


def _part(part: Any, where: str) -> str:
    """Text of a part of a message."""
    if isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text":
        text = part["text"]
        if isinstance(text, str):
            return text
    raise ApiError(
        400, f"{where}.content has a part that is no text; only text is read", param="messages"
    )
