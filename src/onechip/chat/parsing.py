"""`parse`: a whole answer at once, for tests, tools and offline use. The server's state machine, without a server.

Text is cut at control pieces spelled out in it, which is what a file or a test vector holds; ids are read as they are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

from onechip.chat.controls import MEANINGS, Control, PromptEnd, controls_of
from onechip.chat.detokenize import Detokenizer
from onechip.chat.parser import Parser
from onechip.chat.parts import Gathered, Part
from onechip.chat.schemas import tool_schemas
from onechip.chat.tokenizer import GEMMA4_CONTROL, Tokenizer, load_tokenizer
from onechip.checkpoint.source import default_cache_dir, open_checkpoint
from onechip.errors import CheckpointError, InvalidRequest

Item = str | tuple[Control]  # text, or the meaning of a control token
Group = int | Sequence[int] | None

SPELLINGS: Mapping[str, Control] = {
    name: MEANINGS.get(name, "other") for name in [*GEMMA4_CONTROL, "<eos>", "<bos>", "<pad>"]
}
GEMMA_IDS: Mapping[int, Control] = {
    index: MEANINGS.get(name, "other") for name, index in (*GEMMA4_CONTROL.items(), ("<eos>", 1))
}


def parse(
    text_or_ids: str | Sequence[str] | Sequence[int],
    tools: Iterable[Any] | None = None,
    prompt_ended: PromptEnd = "no_channel",
    finish: Literal["stop", "length"] = "stop",
    group: Group = None,
    *,
    tokenizer: Tokenizer | None = None,
) -> dict[str, Any]:
    """What an answer says: `{"reasoning", "content", "tool_calls": [{"name", "arguments"}], "finish"}`.

    `text_or_ids`: text with control pieces spelled out, or that in chunks (cut anywhere), or token ids. `tools`: as in
    a request; they type the arguments. `prompt_ended`: whether the prompt left a thought open. `finish`: "length" when
    it was cut off; a stop id in it ends it with "stop" in any case. `group`: characters or tokens a delta (a number, or
    the sizes of the first deltas), which changes nothing. `tokenizer`: of the ids; without one they are Gemma's.
    """
    parser = Parser(prompt_ended, tool_schemas(tools))
    said = Gathered()
    stopped = finish == "stop"
    for delta in _deltas(text_or_ids, group, tokenizer):
        over = _feed(parser, delta)
        said.add(_taken(parser))
        if over:
            stopped = True
            break
    parser.end(stopped=stopped)
    said.add(_taken(parser))
    return as_dict(said, "tool_calls" if stopped and parser.completed else finish_of(stopped))


def finish_of(stopped: bool) -> str:
    return "stop" if stopped else "length"


def as_dict(said: Gathered, finish: str) -> dict[str, Any]:
    return {
        "reasoning": said.reasoning or None,
        "content": said.content or None,
        "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in said.calls],
        "finish": finish,
    }


def _feed(parser: Parser, items: Iterable[Item]) -> bool:
    """True when one of them ended the answer."""
    for item in items:
        if isinstance(item, str):
            parser.text(item)
        elif item[0] == "end":
            return True
        else:
            parser.control(item[0])
    return False


def _taken(parser: Parser) -> list[Part]:
    parts, parser.parts = parser.parts, []
    return parts


def _deltas(
    given: str | Sequence[str] | Sequence[int], group: Group, tokenizer: Tokenizer | None
) -> Iterator[list[Item]]:
    if isinstance(given, str):
        given = list(_cut(given, group))
    if given and isinstance(given[0], int):
        yield from _id_deltas([i for i in given if isinstance(i, int)], group, tokenizer)
        return
    splitter = Splitter()
    for chunk in given:
        yield list(splitter.push(str(chunk)))
    yield list(splitter.flush())


def _cut(whole: Any, group: Group) -> Iterator[Any]:
    """A string or list in pieces of `group`."""
    if group is None:
        yield whole
        return
    sizes = iter(()) if isinstance(group, int) else iter(group)
    step = group if isinstance(group, int) else len(whole)
    start = 0
    while start < len(whole):
        size = max(1, next(sizes, step))
        yield whole[start : start + size]
        start += size


class Splitter:
    """Cuts text at spelled-out control pieces, however its chunks are cut; holds back what may become one."""

    def __init__(self) -> None:
        self._held = ""
        self._longest = max(map(len, SPELLINGS))

    def push(self, text: str) -> Iterator[Item]:
        if not self._held and "<" not in text:
            yield text
            return
        text = self._held + text
        done = at = 0
        while (at := text.find("<", at)) >= 0:
            piece = self._at(text, at)
            if piece is not None:
                yield text[done:at]
                yield (SPELLINGS[piece],)
                done = at = at + len(piece)
            elif self._may_become(text[at : at + self._longest]):
                break
            else:
                at += 1
        end = at if at >= 0 else len(text)
        self._held = text[end:]
        yield text[done:end]

    def flush(self) -> Iterator[Item]:
        held, self._held = self._held, ""
        yield held

    def _at(self, text: str, at: int) -> str | None:
        found = (name for name in SPELLINGS if text.startswith(name, at))
        return max(found, key=len, default=None)

    def _may_become(self, rest: str) -> bool:
        return any(name.startswith(rest) for name in SPELLINGS)


def _id_deltas(ids: list[int], group: Group, tokenizer: Tokenizer | None) -> Iterator[list[Item]]:
    controls = GEMMA_IDS if tokenizer is None else controls_of(tokenizer)
    tokenizer = tokenizer or _gemma()
    detokenizer = Detokenizer(tokenizer)
    for delta in _cut(ids, group):
        items: list[Item] = []
        for token in delta:
            if token in controls:
                items.append(detokenizer.flush())
                items.append((controls[token],))
            else:
                items.append(detokenizer.push((token,)))
        yield items
    yield [detokenizer.flush()]


@cache
def _gemma() -> Tokenizer:
    """Gemma's own vocabulary, from the demo package; Gemma 3 and 4 number ordinary pieces alike."""
    try:
        tokenizer = load_tokenizer(open_checkpoint("demo"), default_cache_dir())
    except CheckpointError as error:
        raise InvalidRequest(f"token ids need a tokenizer: pass tokenizer= ({error})") from error
    assert tokenizer is not None
    return tokenizer
