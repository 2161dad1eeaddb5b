"""Every error a user, a file or a peer can cause.

Each message says the value, the limit and the remedy, because it is printed as the one line a user sees (`onechip`
exits with status 2) or as the `message` of an HTTP error. Our own mistakes are `assert`s, never one of these.
This module knows HTTP status numbers but nothing of HTTP.
"""


class OnechipError(Exception):
    """Base of all typed errors.

    `status` is the HTTP status the server answers with, `kind` OpenAI's `type`, `code` its machine-readable `code`
    and `param` the request field at fault, or None.
    """

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(OnechipError):
    """A request field has a value we cannot honour; `param` names it."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt plus max_tokens, does not fit `max_model_len`."""

    code = "context_length_exceeded"


class UnknownModel(OnechipError):
    """The request names a model this server does not serve."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class Unauthorized(OnechipError):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Overloaded(OnechipError):
    """The queue is full; the client should retry later."""

    status = 503
    kind = "overloaded_error"
    code = "queue_full"


class ShuttingDown(OnechipError):
    """The server drains: it finishes what runs and begins nothing; another replica can take the request."""

    status = 503
    kind = "server_error"
    code = "shutting_down"


class RequestTimeout(OnechipError):
    """The request's time was up before its answer was complete; sending it again would take as long."""

    status = 504
    kind = "timeout_error"
    code = "request_timeout"


class EngineDead(OnechipError):
    """The engine process is gone or not up yet; nothing can be generated."""

    status = 503
    kind = "server_error"
    code = "engine_unavailable"


class NumericalError(OnechipError):
    """The model produced logits that are not finite for this request."""

    code = "non_finite_logits"


class StartupError(OnechipError):
    """Base of what stops a command before it serves: printed as one line, exit status 2."""


class CheckpointError(StartupError):
    """A checkpoint file is missing, truncated, malformed, or does not hold the tensors its config promises."""


class ConfigError(StartupError):
    """A config key is missing, unknown or out of range, or a flag does not fit the model."""


class DoesNotFit(StartupError):
    """The model or its K/V pages do not fit the chip's memory."""


class ArmFailed(OnechipError):
    """A server under measurement could not be started, died, or could not be stopped; the ladder goes on without it."""

    code = "arm_failed"
