"""The messages between the server process and the engine process: tagged msgpack, one message a zmq frame.

It owns the encoding only; who sends what and when is the story of `engine.process` and `engine.client`. The payloads
are the dataclasses of `request.py`, unchanged. A batch of events and the statistics of a step travel as one message,
because the cost of a message is per message, not per token.
"""

import msgspec

from onechip.config import EngineConfig
from onechip.request import EngineInfo, EngineStats, Event, Request


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message to the engine process: what to build."""

    model: str
    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Requests to run, in this order."""

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Requests nobody waits for any more; unknown and finished ids are ignored."""

    request_ids: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave the loop: every pending request is aborted and the process exits with status 0."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is built and has generated a token."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be built. `expected`: a typed start-up error, whose message is the whole story."""

    message: str
    expected: bool


class Batch(msgspec.Struct, frozen=True, tag=True):
    """Everything one engine step has to say."""

    events: tuple[Event, ...]
    stats: EngineStats


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """Last message of an engine that broke: the process exits non-zero."""

    message: str


ToEngine = Start | Submit | Abort | Stop
FromEngine = Ready | Failed | Batch | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> FromEngine:
    return _from_engine.decode(frame)
