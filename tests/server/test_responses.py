"""OpenAI's Responses dialect: the official client, every event, and conversations that are continued by id."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.dialect_tokenizer import ids_of
from tests.fakes import FakeEngine
from tests.server.harness import MODEL, Running, error, last_prompt, ok, running, say, until
from tests.server.test_messages import CALLS, THOUGHT

from onechip.config import ServerConfig
from onechip.server.responses_store import ResponseStore, Stored, UnknownResponse

PATH = "/v1/responses"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Look up weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(max_model_len=4096), family="dialect") as it:
        yield it


def ask(server: Running, **fields: Any) -> Any:
    return server.openai.responses.create(**{"model": MODEL, "input": "hi", **fields})


def events(server: Running, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "input": "hi", "stream": True, **fields}
    answer = server.http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = []
    for block in answer.text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what may differ between two requests."""
    told = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at")}
    strip = ("id", "call_id")
    told["output"] = [{k: v for k, v in item.items() if k not in strip} for item in told["output"]]
    return told


def test_the_client_gets_text(server: Running):
    say(server, "Hello.<turn|>")
    answer = ask(server, instructions="Be brief.", metadata={"a": "b"})
    assert answer.output_text == "Hello."
    assert (answer.status, answer.object, answer.error) == ("completed", "response", None)
    assert answer.usage.input_tokens == len(server.engine.seen[-1].prompt_ids)
    assert answer.usage.output_tokens == len(ids_of("Hello.<turn|>"))
    assert (answer.instructions, answer.metadata) == ("Be brief.", {"a": "b"})
    assert "<|turn>system\nBe brief.<turn|>" in last_prompt(server)


SCRIPTS: list[tuple[str, dict[str, Any], str]] = [
    ("Hello.<turn|>", {}, "completed"),
    ("Hello.<turn|>", {"stop": ["lo"]}, "completed"),
    ("Hello, world", {"max_output_tokens": 5}, "incomplete"),
    (CALLS, {"tools": [WEATHER]}, "completed"),
    ("Sure.\n" + CALLS, {"tools": [WEATHER]}, "completed"),
    (THOUGHT + "Warm.<turn|>", {"reasoning": {"effort": "high"}}, "completed"),
    (THOUGHT + "Ok." + CALLS, {"reasoning": {"effort": "low"}, "tools": [WEATHER]}, "completed"),
    ('<|tool_call>call:get_weather{city:<|"|>Par', {"tools": [WEATHER], "max_output_tokens": 22}, "incomplete"),
    ("<turn|>", {}, "completed"),
]  # fmt: skip


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize(("text", "fields", "status"), SCRIPTS)
def test_a_stream_says_what_the_whole_response_says(
    server: Running, text: str, fields: dict[str, Any], status: str, per_step: int
):
    say(server, text, per_step)
    whole = ok(server.http.post(PATH, json={"model": MODEL, "input": "hi", **fields}))
    streamed = events(server, **fields)
    assert streamed[-1]["type"] == f"response.{status}"
    assert plain(streamed[-1]["response"]) == plain(whole)
    assert whole["status"] == status
    assert (whole["incomplete_details"] is None) == (status == "completed")
    stored = ok(server.http.get(f"{PATH}/{streamed[-1]['response']['id']}"))
    assert stored == streamed[-1]["response"]


@pytest.mark.parametrize("per_step", [1, 4])
def test_deltas_add_up_to_their_items(server: Running, per_step: int):
    say(server, THOUGHT + "Ok." + CALLS, per_step)
    seen = events(server, tools=[WEATHER], reasoning={"effort": "high"})
    kinds = [event["type"].removeprefix("response.") for event in seen]
    assert kinds[:2] == ["created", "in_progress"]
    output = seen[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", *["function_call"] * 2]
    for index, item in enumerate(output):
        mine = [event for event in seen if event.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added"
        assert mine[0]["item"]["status"] == "in_progress"
        assert mine[-1]["type"] == "response.output_item.done"
        assert mine[-1]["item"] == item
        said = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        text = item.get("arguments") or item["content"][0]["text"]
        assert said == text
        done = [
            e for e in mine if e["type"].endswith((".text.done", "_text.done", "arguments.done"))
        ]
        assert [e.get("text", e.get("arguments")) for e in done] == [text]
        assert all(e.get("item_id", item["id"]) == item["id"] for e in mine)


def test_the_client_streams_and_gathers(server: Running):
    say(server, THOUGHT + "Ok." + CALLS)
    with server.openai.responses.stream(
        model=MODEL, input="hi", tools=[WEATHER], reasoning={"effort": "high"}
    ) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert seen[-1] == "response.completed"
    assert final.output_text == "Ok."
    calls = [json.loads(i.arguments) for i in final.output if i.type == "function_call"]
    assert calls == [{"city": "Paris", "days": 2}, {"city": "Rome"}]


def test_a_tool_round_trip_of_two_calls_by_hand_and_by_id(server: Running):
    say(server, THOUGHT + CALLS)
    first = ask(server, tools=[WEATHER], reasoning={"effort": "high"})
    calls = [item for item in first.output if item.type == "function_call"]
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"{n} degrees"}
        for n, call in enumerate(calls, 1)
    ]
    sent: list[Any] = [{"role": "user", "content": "hi"}]
    sent += [item.model_dump(exclude_none=True) for item in first.output]
    prompts: list[str] = []
    for fields in (
        {"input": [*sent, *outputs]},
        {"input": outputs, "previous_response_id": first.id},
    ):
        say(server, "Hm.\n<channel|>Warm.<turn|>")  # the prompt ends inside a thought
        second = ask(server, tools=[WEATHER], reasoning={"effort": "high"}, **fields)
        assert second.output_text == "Warm."
        prompts.append(last_prompt(server))
    assert prompts[0] == prompts[1]
    assert 'call:get_weather{city:<|"|>Paris<|"|>,days:2}' in prompts[0]
    assert prompts[0].index("1 degrees") < prompts[0].index("2 degrees")


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_by_id_without_the_old_instructions(server: Running, stream: bool):
    last = None
    for number in range(3):
        say(server, f"answer {number}<turn|>")
        fields: dict[str, Any] = {"input": f"question {number}", "instructions": f"rule {number}"}
        if last is not None:
            fields["previous_response_id"] = last
        made = events(server, **fields)[-1]["response"]["id"] if stream else None
        last = made or ask(server, **fields).id
    text = last_prompt(server)
    order = ["rule 2", "question 0", "answer 0", "question 1", "answer 1", "question 2"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert "rule 1" not in text


def test_what_is_not_to_be_stored_is_not(server: Running):
    say(server, "a<turn|>")
    answer = ask(server, store=False)
    with pytest.raises(openai.NotFoundError):
        server.openai.responses.retrieve(answer.id)
    with pytest.raises(openai.NotFoundError) as gone:
        ask(server, previous_response_id=answer.id)
    body: Any = gone.value.body
    assert (body["code"], body["param"]) == ("response_not_found", "previous_response_id")


def test_a_stored_response_is_read_and_deleted(server: Running):
    say(server, "a<turn|>")
    answer = ask(server)
    kept = server.openai.responses.retrieve(answer.id)
    assert kept.output_text == "a"
    items = server.openai.responses.input_items.list(answer.id).data
    assert [item.type for item in items] == ["message"]
    server.openai.responses.delete(answer.id)
    for path in (f"{PATH}/{answer.id}", f"{PATH}/{answer.id}/input_items"):
        assert error(server.http.get(path), 404)["code"] == "response_not_found"
    error(server.http.delete(f"{PATH}/{answer.id}"), 404)


def test_the_store_forgets_the_least_used_and_never_exceeds_its_limits():
    def stored(key: str, text: str = "") -> Stored:
        return Stored({"id": key, "output": []}, ({"text": text},))

    store = ResponseStore(3, 1000)
    for key in "abc":
        store.put(stored(key))
    store.get("a")
    store.put(stored("d"))
    with pytest.raises(UnknownResponse):
        store.get("b")
    assert len(store) == 3
    store.put(stored("e", "x" * 850))
    assert store.bytes <= 1000
    assert store.get("e")
    store.put(stored("f", "x" * 2000))
    assert (len(store), store.bytes) == (0, 0)


def test_a_store_of_none_still_answers(server: Running):
    config = ServerConfig(stored_responses=0)
    with running(FakeEngine(script=ids_of("a<turn|>")), family="dialect", config=config) as it:
        answer = ask(it)
        error(it.http.get(f"{PATH}/{answer.id}"), 404)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_output_tokens": 0}, "max_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "computer_call_output"}]}, "input"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "encrypted_content"),
    ({"input": 5}, "input"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), BAD, ids=lambda v: str(v)[:40])
def test_what_cannot_be_honoured_is_named(server: Running, fields: dict[str, Any], named: str):
    server.engine.seen.clear()
    refused = error(server.http.post(PATH, json={"model": MODEL, "input": "hi", **fields}), 400)
    assert named in refused["message"]
    assert server.engine.seen == []


def test_an_engine_that_dies_ends_a_stream_with_a_failed_response():
    engine = FakeEngine(sleep=0.02, break_at=20, max_model_len=9000)
    with running(engine, family="dialect") as server:
        last = events(server)[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"]["code"] == "engine_failed"
        until(lambda: server.outcome == [1], 5)
