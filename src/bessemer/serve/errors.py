"""What goes wrong with a request, in the shape OpenAI's clients read: {"error": {message, type, param, code}}."""

from __future__ import annotations

from typing import Any

from bessemer.errors import BessemerError


class ApiError(Exception):
    """An answer with this status; `param` is the field that is wrong, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def document(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: a field of the body is wrong."""
    return ApiError(400, message, param=param, code=code)


def refusal(error: BessemerError) -> ApiError:
    """What the engine or the template refuses, as an answer."""
    from bessemer.generate import (
        QueueFull,
    )  # here, so that a server without a model does not load one's libraries

    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    return wrong(None, str(error))
