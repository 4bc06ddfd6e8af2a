"""The JSON of answers, whole or as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from edgelin.runtimes.server.errors import ApiError
from edgelin.runtimes.server.mailbox import End, Event
from edgelin.runtimes.server.requests import Call

DONE = "data: [DONE]\n\n"


def event(content: Any) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n"


@dataclass
class Answer:
    """What is told of one request, and what of it has come.

    Args:
        call: The request.
        model: Name of the model.
        fingerprint: What changes with the weights.
        prompt_tokens: Tokens before the texts, those of the state included.
        cached_tokens: Those that the state had read before.
        session: Id of the session.
    """

    call: Call
    model: str
    fingerprint: str
    prompt_tokens: int
    cached_tokens: int
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Choose an id."""
        chat = self.call.messages is not None
        self._object = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        self._chat = chat

    def add(self, news: Event) -> None:
        """Take what has come of a text."""
        self.texts[news.index] = self.texts.get(news.index, "") + news.text
        if news.end is not None:
            self.ends[news.index] = news.end

    @property
    def failed(self) -> ApiError | None:
        """Why a text has failed."""
        return next((end.error for end in self.ends.values() if end.error is not None), None)

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, when every text has ended."""
        choices = []
        for index in sorted(self.ends):
            text, reason = self.texts.get(index, ""), self.ends[index].reason
            said: dict[str, Any] = {"text": text}
            if self._chat:
                said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": reason})
        return {
            **self._head, "object": self._object, "choices": choices, "usage": self.usage(),
            **self._session(),
        }  # fmt: skip

    def opening(self, texts: int) -> list[str]:
        """First events of a stream."""
        if not self._chat:
            return []
        return [self._chunk(i, {"role": "assistant", "content": ""}, None) for i in range(texts)]

    def chunks(self, news: Event) -> list[str]:
        """Events for what has come of a text."""
        found = []
        if news.text:
            found.append(self._chunk(news.index, {"content": news.text}, None))
        if news.end is not None and news.end.reason is not None:
            found.append(self._chunk(news.index, {}, news.end.reason))
        return found

    def closing(self) -> list[str]:
        """Last events of a stream."""
        if not self.call.include_usage:
            return [DONE]
        return [event({**self._stream_head(), "choices": [], "usage": self.usage()}), DONE]

    def usage(self) -> dict[str, Any]:
        """Numbers of tokens."""
        written = sum(end.tokens for end in self.ends.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _chunk(self, index: int, delta: dict[str, str], reason: str | None) -> str:
        """An event for one text."""
        said: dict[str, Any] = (
            {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        )
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self.call.include_usage else {}
        session = self._session() if reason is not None else {}
        return event({**self._stream_head(), "choices": [choice], **usage, **session})

    def _stream_head(self) -> dict[str, Any]:
        """What every event of a stream begins with."""
        return {**self._head, "object": self._object + (".chunk" if self._chat else "")}

    def _session(self) -> dict[str, Any]:
        """Where the session stands now."""
        if self.call.session is None:
            return {}
        return {"session_id": self.call.session, "session_position": self.ends[0].position}
