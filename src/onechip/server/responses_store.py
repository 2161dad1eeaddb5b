"""Responses that can be continued: the latest ones, in memory, within a count and a number of bytes.

What is used last is kept longest. Nothing survives a restart, and nothing is shared between servers: a client that must
not lose a conversation sends it whole. Ids are random and not listed, so one client cannot find another's.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from onechip.errors import OnechipError


class UnknownResponse(OnechipError):
    """No such response is stored: never made, made with store: false, deleted, or pushed out by later ones."""

    status = 404
    kind = "invalid_request_error"
    code = "response_not_found"


@dataclass(frozen=True)
class Stored:
    """A response as it was sent, and the whole conversation up to and with its output, as input items."""

    response: dict[str, Any]
    conversation: tuple[dict[str, Any], ...]

    @property
    def size(self) -> int:
        return len(msgspec.json.encode((self.response, self.conversation)))


class ResponseStore:
    """At most `max_count` responses of at most `max_bytes` together."""

    def __init__(self, max_count: int, max_bytes: int):
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.bytes = 0
        self._kept: OrderedDict[str, tuple[Stored, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, stored: Stored) -> None:
        size = stored.size
        self._kept[stored.response["id"]] = (stored, size)
        self.bytes += size
        while len(self._kept) > self.max_count or self.bytes > self.max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self.bytes -= freed

    def get(self, response_id: str, param: str | None = None) -> Stored:
        """Raises UnknownResponse."""
        found = self._kept.get(response_id)
        if found is None:
            raise self._unknown(response_id, param)
        self._kept.move_to_end(response_id)
        return found[0]

    def delete(self, response_id: str) -> None:
        """Raises UnknownResponse."""
        found = self._kept.pop(response_id, None)
        if found is None:
            raise self._unknown(response_id, None)
        self.bytes -= found[1]

    def _unknown(self, response_id: str, param: str | None) -> UnknownResponse:
        return UnknownResponse(
            f"no response {response_id!r:.80} is stored here: the latest {self.max_count} are kept, within "
            f"{self.max_bytes} bytes, while the server runs; send the conversation as input instead",
            param=param,
        )
