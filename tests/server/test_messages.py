"""Anthropic's dialect: the official client, every event, and the same answer whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from tests.dialect_tokenizer import ids_of
from tests.fakes import FakeEngine
from tests.server.harness import MODEL, Running, last_prompt, ok, running, say, until

from onechip.config import ServerConfig

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Look up weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
CALLS = (
    '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
    '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|><|tool_response>'
)
THOUGHT = "<|channel>thought\nLet me see.\n<channel|>"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(max_model_len=4096), family="dialect") as it:
        yield it


def client(server: Running) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="none", max_retries=0)


def ask(server: Running, **fields: Any) -> Any:
    return client(server).messages.create(
        **{"model": MODEL, "max_tokens": 500, "messages": MESSAGES, **fields}
    )


def stream(server: Running, **fields: Any) -> Any:
    """The message that the client puts together from the events, and the events."""
    body = {"model": MODEL, "max_tokens": 500, "messages": MESSAGES, **fields}
    with client(server).messages.stream(**body) as events:
        seen = list(events)
        return events.get_final_message(), seen


def plain(message: Any) -> dict[str, Any]:
    """A message without what may differ between two requests."""
    told = message.model_dump(exclude_none=True)
    told.pop("id")
    for block in told["content"]:
        block.pop("parsed_output", None)
        block.pop("id", None)
    return told


def test_the_client_chats(server: Running):
    say(server, "Hello <there>.<turn|>")
    answer = ask(server, system="Be brief.")
    assert [block.text for block in answer.content] == ["Hello <there>."]
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", MODEL)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    seen = server.engine.seen[-1]
    assert answer.usage.input_tokens == len(seen.prompt_ids)
    assert answer.usage.output_tokens == len(ids_of("Hello <there>.<turn|>"))
    assert "<|turn>system\nBe brief.<turn|>" in last_prompt(server)


SCRIPTS: list[tuple[str, dict[str, Any], str]] = [
    ("Hello.<turn|>", {}, "end_turn"),
    ("Hello.<turn|>", {"stop_sequences": ["lo"]}, "stop_sequence"),
    ("Hello, world", {"max_tokens": 5}, "max_tokens"),
    (CALLS, {"tools": [WEATHER]}, "tool_use"),
    ("Sure.\n" + CALLS, {"tools": [WEATHER]}, "tool_use"),
    (
        THOUGHT + "It is warm.<turn|>",
        {"thinking": {"type": "enabled", "budget_tokens": 100}},
        "end_turn",
    ),
    (
        THOUGHT + "Calling." + CALLS,
        {"thinking": {"type": "adaptive"}, "tools": [WEATHER]},
        "tool_use",
    ),
    ("<turn|>", {}, "end_turn"),
]


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize(("text", "fields", "reason"), SCRIPTS)
def test_a_stream_says_what_the_whole_message_says(
    server: Running, text: str, fields: dict[str, Any], reason: str, per_step: int
):
    say(server, text, per_step)
    whole = ask(server, **fields)
    streamed, _ = stream(server, **fields)
    assert whole.stop_reason == reason
    assert plain(streamed) == plain(whole)


def test_calls_are_tool_use_blocks_with_parsed_input(server: Running):
    say(server, THOUGHT + "Calling." + CALLS)
    answer = ask(server, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 100})
    thought, text, first, second = answer.content
    assert (thought.type, thought.thinking) == ("thinking", "Let me see.")
    assert thought.signature
    assert (text.type, text.text) == ("text", "Calling.")
    assert (first.name, first.input) == ("get_weather", {"city": "Paris", "days": 2})
    assert second.input == {"city": "Rome"}
    assert first.id != second.id


def test_events_come_in_anthropics_order(server: Running):
    say(server, THOUGHT + "Ok." + CALLS)
    body = {"model": MODEL, "max_tokens": 500, "messages": MESSAGES, "stream": True}
    body |= {"tools": [WEATHER], "thinking": {"type": "enabled", "budget_tokens": 9}}
    text = server.http.post("/v1/messages", json=body).text
    events = [parse(event) for event in text.split("\n\n") if event]
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    open_block: int | None = None
    blocks = 0
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None and event["index"] == blocks
                open_block, blocks = event["index"], blocks + 1
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case kind:
                assert kind == "content_block_delta" and event["index"] == open_block
    assert blocks == 4 and open_block is None
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == len(server.engine.seen[-1].prompt_ids)
    assert events[-2]["usage"]["output_tokens"] == len(server.engine.script or ())


def parse(event: str) -> dict[str, Any]:
    name, data = event.split("\n")
    body = json.loads(data.removeprefix("data: "))
    assert name == f"event: {body['type']}"
    return body


def test_a_tool_round_trip_of_two_calls(server: Running):
    say(server, THOUGHT + CALLS)
    first = ask(server, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 100})
    uses = [block for block in first.content if block.type == "tool_use"]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": use.id,
            "content": f"{n} degrees",
            "is_error": n == 2,
        }
        for n, use in enumerate(uses, 1)
    ]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    say(server, "Hm.\n<channel|>Warm.<turn|>")  # the prompt ends inside a thought
    second = ask(
        server,
        messages=turns,
        tools=[WEATHER],
        thinking={"type": "enabled", "budget_tokens": 100},
    )
    thought, text = second.content
    assert (thought.thinking, text.text) == ("Hm.", "Warm.")
    asked = last_prompt(server)
    assert 'call:get_weather{city:<|"|>Paris<|"|>,days:2}' in asked
    assert asked.index("1 degrees") < asked.index("Error: 2 degrees")
    assert asked.count("<|tool_response>response:get_weather{") == 2


@pytest.mark.parametrize(
    "choice",
    [{"type": "auto"}, {"type": "none"}, {"type": "auto", "disable_parallel_tool_use": True}],
)
def test_tool_choice_is_translated(server: Running, choice: dict[str, Any]):
    say(server, CALLS)
    answer = ask(server, tools=[WEATHER], tool_choice=choice)
    uses = [block for block in answer.content if block.type == "tool_use"]
    parallel = not choice.get("disable_parallel_tool_use")
    assert len(uses) == (0 if choice["type"] == "none" else 2 if parallel else 1)


def test_a_call_that_was_cut_off_does_not_look_complete(server: Running):
    say(server, '<|tool_call>call:get_weather{city:<|"|>Paris')
    answer = ask(server, tools=[WEATHER], max_tokens=len(server.engine.script or ()))
    assert answer.stop_reason == "max_tokens"
    (block,) = answer.content
    assert block.type == "text"
    assert "Paris" in block.text


def test_a_last_assistant_message_is_continued(server: Running):
    say(server, " upon a time<turn|>")
    answer = ask(server, messages=[*MESSAGES, {"role": "assistant", "content": "Once"}])
    assert answer.content[0].text == " upon a time"
    assert last_prompt(server).endswith("<|turn>model\nOnce")


def test_counting_tokens_equals_the_usage_of_the_message(server: Running):
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
        "tools": [WEATHER],
        "thinking": {"type": "enabled", "budget_tokens": 10},
    }
    say(server, "x<turn|>")
    counted = client(server).messages.count_tokens(**body).input_tokens
    assert server.engine.seen == []
    assert ask(server, **body).usage.input_tokens == counted


def test_errors_have_anthropics_shape(server: Running):
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(server, extra_body={"temperature": 9})
    body: Any = bad.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert "temperature" in body["error"]["message"]
    assert body["request_id"] == bad.value.response.headers["x-request-id"]
    with pytest.raises(anthropic.NotFoundError):
        ask(server, model="other")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"messages": [{"role": "system", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "tool_result"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
    ({"thinking": {"type": "enabled", "display": "omitted"}}, "display"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), BAD, ids=lambda v: str(v)[:40])
def test_what_cannot_be_honoured_is_named(server: Running, fields: dict[str, Any], named: str):
    body = {"model": MODEL, "max_tokens": 5, "messages": MESSAGES, **fields}
    server.engine.seen.clear()
    refused = server.http.post("/v1/messages", json=body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert named in refused.json()["error"]["message"]
    assert server.engine.seen == []


def test_keys_come_as_x_api_key_and_pings_as_events():
    engine = FakeEngine(sleep=0.4, script=ids_of("ok<turn|>"))
    config = ServerConfig(api_keys=("k",), ping_seconds=0.1)
    with running(engine, family="dialect", config=config) as server:
        with pytest.raises(anthropic.AuthenticationError):
            ask(server)
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
        body = {"model": MODEL, "max_tokens": 1, "messages": MESSAGES, "stream": True}
        text = server.http.post("/v1/messages", json=body, headers=headers).text
        kinds = [parse(event)["type"] for event in text.split("\n\n") if event]
        assert kinds[:2] == ["message_start", "ping"] or kinds[0] == "ping"
        assert kinds[-1] == "message_stop"


def test_an_engine_that_dies_ends_a_stream_with_an_error_event():
    engine = FakeEngine(sleep=0.02, break_at=20, max_model_len=9000)
    with running(engine, family="dialect") as server:
        body = {"model": MODEL, "max_tokens": 8000, "messages": MESSAGES, "stream": True}
        text = httpx.post(f"{server.url}/v1/messages", json=body, timeout=10).text
        last = parse([event for event in text.split("\n\n") if event][-1])
        assert last["error"]["type"] == "overloaded_error"
        until(lambda: server.outcome == [1], 5)


def test_overload_is_anthropics_overloaded_error():
    with running(FakeEngine(max_waiting=0), family="dialect") as server:
        body = {"model": MODEL, "max_tokens": 5, "messages": MESSAGES}
        refused = server.http.post("/v1/messages", json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
        assert "retry-after" in refused.headers
        ok(server.http.get("/v1/models"))
