"""The JSON of the two generating routes: OpenAI's chat completions and completions, whole and in chunks."""

import time
from collections.abc import Sequence
from typing import Any

from onechip.chat.output import Delta
from onechip.chat.parts import CallArguments, CallStart, Content, Gathered, Part, Reasoning
from onechip.chat.tokenizer import Tokenizer
from onechip.server.answer import Whole, encode, event_head
from onechip.server.generation import Choice, Generation
from onechip.server.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
    join_completion_logprobs,
    prompt_logprobs,
)


class ChatShape:
    """`chat.completion` and its chunks.

    A thought is `reasoning` and, under the older name, `reasoning_content`. A chunk tells of one thing: some text, some
    thought, or a piece of one call. A call's first chunk has its id, type and name, later ones its index and arguments
    alone, because clients take the absence of a key and a null for different things.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        prompt_logprobs: bool,
        include_reasoning: bool = True,
    ):
        self._include_reasoning = include_reasoning
        self._identity = {"id": request_id, "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._prompt_logprobs = prompt_logprobs
        self.head = event_head(self._identity | {"object": "chat.completion.chunk"})

    def opening(self, choice: Choice) -> bytes | None:
        return (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            % (choice.index)
        )

    def chunks(self, choice: Choice, delta: Delta) -> Sequence[bytes]:
        if not delta.parts:
            content = b'"content":' + encode(delta.text) if delta.text else b""
            return (self._chunk(choice, content, delta),)
        bodies = [encode(body)[1:-1] for body in self._bodies(delta.parts)]
        if not bodies and not delta.entries and delta.finish is None:
            return ()
        first = [self._chunk(choice, body, Delta("")) for body in bodies[:-1]]
        return (*first, self._chunk(choice, bodies[-1] if bodies else b"", delta))

    def _chunk(self, choice: Choice, body: bytes, delta: Delta) -> bytes:
        logprobs = encode(chat_logprobs(delta.entries)) if delta.entries else b"null"
        return b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}' % (
            choice.index,
            body,
            logprobs,
            _finish(choice, delta),
        )

    def _bodies(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        bodies: list[dict[str, Any]] = []
        opened: dict[str, Any] | None = None  # a call that began in the part before
        for part in parts:
            before, opened = opened, None
            match part:
                case Content(text):
                    bodies.append({"content": text})
                case Reasoning(text) if self._include_reasoning:
                    bodies.append({"reasoning": text, "reasoning_content": text})
                case CallStart(index, key, name):
                    opened = {"name": name, "arguments": ""}
                    call = {"index": index, "id": key, "type": "function", "function": opened}
                    bodies.append({"tool_calls": [call]})
                case CallArguments(_, text) if before is not None:
                    before["arguments"] = text
                case CallArguments(index, text):
                    call = {"index": index, "function": {"arguments": text}}
                    bodies.append({"tool_calls": [call]})
                case _:
                    pass
        return bodies

    def whole(
        self, generation: Generation, choices: Sequence[tuple[Choice, Whole]]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            **self._identity,
            "object": "chat.completion",
            "choices": [self._choice(choice, whole) for choice, whole in choices],
        }
        if self._prompt_logprobs:
            found = generation.choices[0].prompt_logprobs or ()
            body["prompt_logprobs"] = prompt_logprobs(self._tokenizer, found)
        return body

    def _choice(self, choice: Choice, whole: Whole) -> dict[str, Any]:
        asked = choice.request.sampling.logprobs is not None
        return {
            "index": choice.index,
            "message": self._message(whole.said),
            "logprobs": chat_logprobs(whole.entries) if asked else None,
            "finish_reason": whole.finish,
            "stop_reason": choice.output.stop_reason,
        }

    def _message(self, said: Gathered) -> dict[str, Any]:
        calls, reasoning = said.calls, said.reasoning
        nothing = None if calls or reasoning else ""
        message: dict[str, Any] = {"role": "assistant", "content": said.content or nothing}
        message["refusal"] = None
        if reasoning and self._include_reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message


class CompletionShape:
    """`text_completion`, whole and in chunks; `echo_scores`: the echoed prompt's log probabilities are wanted too."""

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        echo_scores: bool,
        prompt_logprobs: bool,
    ):
        identity = {"id": request_id, "object": "text_completion", "created": int(time.time())}
        self._identity = identity | {"model": model}
        self._tokenizer = tokenizer
        self._echo_scores = echo_scores
        self._prompt_logprobs = prompt_logprobs
        self.head = event_head(self._identity)

    def opening(self, choice: Choice) -> bytes | None:
        if not choice.echo and not self._echo_scores:
            return None
        logprobs = encode(self._echoed(choice)) if self._echo_scores else b"null"
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (
            choice.index,
            encode(choice.echo),
            logprobs,
        )

    def chunks(self, choice: Choice, delta: Delta) -> Sequence[bytes]:
        logprobs = encode(completion_logprobs(delta.entries)) if delta.entries else b"null"
        chunk = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            choice.index,
            encode(delta.text),
            logprobs,
            _finish(choice, delta),
        )
        return (chunk,)

    def whole(
        self, generation: Generation, choices: Sequence[tuple[Choice, Whole]]
    ) -> dict[str, Any]:
        return {
            **self._identity,
            "choices": [self._choice(choice, whole) for choice, whole in choices],
        }

    def _choice(self, choice: Choice, whole: Whole) -> dict[str, Any]:
        element: dict[str, Any] = {
            "index": choice.index,
            "text": choice.echo + whole.text,
            "logprobs": self._logprobs(choice, whole),
            "finish_reason": whole.finish,
            "stop_reason": choice.output.stop_reason,
        }
        if self._prompt_logprobs:
            found = choice.prompt_logprobs or ()
            element["prompt_logprobs"] = prompt_logprobs(self._tokenizer, found)
        return element

    def _logprobs(self, choice: Choice, whole: Whole) -> dict[str, list[Any]] | None:
        if choice.request.sampling.logprobs is None:
            return None
        generated = completion_logprobs(whole.entries)
        if not self._echo_scores:
            return generated
        return join_completion_logprobs(self._echoed(choice), generated)

    def _echoed(self, choice: Choice) -> dict[str, list[Any]]:
        return echo_logprobs(
            self._tokenizer,
            choice.request.prompt_ids,
            choice.prompt_logprobs or (),
            skip_special=choice.request.sampling.skip_special_tokens,
        )


def _finish(choice: Choice, delta: Delta) -> bytes:
    if delta.finish is None:
        return b"null"
    return encode(delta.finish) + b',"stop_reason":' + encode(choice.output.stop_reason)
