"""Refusals in the form of OpenAI's API, so that its clients raise what their users expect."""

from __future__ import annotations

from typing import Any

_SHORT = 500  # characters of a message: what was given may be long
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is not answered.

    Args:
        status: HTTP status.
        message: What was given, what is allowed, what to do.
        param: The field of the request that is wrong.
        code: A word for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.message = message if len(message) <= _SHORT else message[: _SHORT - 3] + "..."

    def as_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _TYPES.get(self.status)
        if kind is None:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}
