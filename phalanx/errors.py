"""Every error Phalanx raises on purpose.

    PhalanxError                    500  our fault unless a subclass says otherwise
    ├── UserError                   400  the caller can mend it; the CLI prints it without a traceback
    │   ├── InvalidRequest          400  a value in a request
    │   │   └── ContextLengthExceeded
    │   ├── RequestTooLarge         413  a body above the limit
    │   ├── ModelNotFound           404  a model name that is not served
    │   ├── ConfigError             400  a flag, variable or file of ours
    │   │   └── ClusterMissing           it names a cluster that is not there; later it may be
    │   ├── CheckpointError         400  model files: missing, unreadable, contradictory
    │   │   ├── FormatError              a file that breaks its own format
    │   │   └── UnsupportedModel         a family, dtype or quantisation we do not have
    │   └── NotEnoughMemory         400  says needed, available, and what would fit
    ├── Unavailable                 503  try again after `retry_after` seconds
    │   ├── QueueFull
    │   ├── Loading
    │   ├── Recovering              what was lost is not made good yet
    │   └── Draining
    ├── RequestTimeout              504  the request's deadline passed
    ├── PoisonRequest               500  its workers were lost each time it ran; the same request must not come again
    └── EngineDead                  503  the engine process is gone

`message` says what happened and why, `fix` what to do; both are single-line text meant for people. `status`,
`type`, `code` and `param` are what the OpenAI error object carries. No message may echo a prompt.
"""

from __future__ import annotations

from typing import Any


class PhalanxError(Exception):
    status: int = 500
    type: str = "server_error"
    code: str | None = "internal_error"
    retry_after: float | None = None
    retryable: bool | None = None
    """Whether the client should send the same request again; None leaves that to the status."""

    def __init__(self, message: str, *, fix: str | None = None, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.param = param
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.message} {self.fix}" if self.fix else self.message

    def body(self) -> dict[str, Any]:
        """The OpenAI error object: `{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


class UserError(PhalanxError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class InvalidRequest(UserError):
    pass


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class RequestTooLarge(UserError):
    status = 413
    code = "request_too_large"


class ModelNotFound(UserError):
    status = 404
    code = "model_not_found"


class ConfigError(UserError):
    code = "invalid_config"


class ClusterMissing(ConfigError):
    pass


class CheckpointError(UserError):
    code = "invalid_checkpoint"


class FormatError(CheckpointError):
    pass


class UnsupportedModel(CheckpointError):
    code = "unsupported_model"


class NotEnoughMemory(UserError):
    code = "not_enough_memory"


class Unavailable(PhalanxError):
    status = 503
    code = "service_unavailable"

    def __init__(self, message: str, *, retry_after: float = 1.0, **details: Any):
        super().__init__(message, **details)
        self.retry_after = retry_after


class QueueFull(Unavailable):
    code = "overloaded"


class Loading(Unavailable):
    pass


class Recovering(Unavailable):
    pass


class Draining(Unavailable):
    pass


class RequestTimeout(PhalanxError):
    status = 504
    type = "timeout_error"
    code = "timeout"


class PoisonRequest(PhalanxError):
    code = "poison_request"
    retryable = False


class EngineDead(PhalanxError):
    status = 503
    code = "service_unavailable"
