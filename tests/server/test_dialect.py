"""Gemma 4's dialect over HTTP: thoughts, tool calls and finish reasons, streamed as whole, in groups of any size."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.dialect_tokenizer import BOS, CHANNEL, CHANNEL_END, RESPONSE, TURN_END, dialect, ids_of
from tests.fakes import FakeEngine
from tests.server.harness import MODEL, Running, error, ok, parse_events, running

from onechip.chat.arguments import Arguments

GREET = [{"role": "user", "content": "hi"}]
CONTROL_TEXT = [dialect().piece_bytes(i).decode() for i in sorted(dialect().special_ids)]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("get_weather", location={"type": "string"}), tool("f", x={"type": "integer"})]
THOUGHT = "<|channel>thought\nNeed the weather.\n<channel|>"
WEATHER = '<|tool_call>call:get_weather{location:<|"|>Rome<|"|>}<tool_call|>'
V10 = f"{THOUGHT}Checking now.{WEATHER}<|tool_response>"
TWO = f"{THOUGHT}Checking now.{WEATHER}<|tool_call>call:f{{x:1}}<tool_call|><|tool_response>"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(max_model_len=4096), family="dialect") as it:
        yield it


@pytest.fixture
def engine(server: Running) -> Iterator[FakeEngine]:
    yield server.engine
    server.engine.script = None
    server.engine.per_step = 1
    server.engine.sleep = 0.0


def chat(server: Running, **fields: Any) -> dict[str, Any]:
    body = {"messages": GREET, "max_tokens": 2000, **fields}
    return ok(server.post("/v1/chat/completions", body))


def message(answer: dict[str, Any]) -> dict[str, Any]:
    """What a choice says, with ids left out, as a stream is gathered too."""
    choice = answer["choices"][0]
    said = choice["message"]
    calls = [
        (c["type"], c["function"]["name"], c["function"]["arguments"])
        for c in said.get("tool_calls") or []
    ]
    assert said.get("reasoning") == said.get("reasoning_content")
    for text in CONTROL_TEXT:
        assert text not in (said["content"] or "")
    return {
        "content": said["content"] or "",
        "reasoning": said.get("reasoning") or "",
        "calls": calls,
        "finish": choice["finish_reason"],
        "usage": answer["usage"],
    }


def streamed(server: Running, **fields: Any) -> dict[str, Any]:
    body = {"messages": GREET, "max_tokens": 2000, **fields}
    body["stream_options"] = {"include_usage": True}
    *chunks, last = server.stream("/v1/chat/completions", **body)
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert said["finish"] is None, "news after the end"
        said["finish"] = choice["finish_reason"]
        delta = choice["delta"]
        said["content"] += delta.get("content") or ""
        said["reasoning"] += delta.get("reasoning") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            add_call(said["calls"], call)
    said["calls"] = [tuple(call) for call in said["calls"]]
    return said | {"usage": last["usage"]}


def add_call(calls: list[list[str]], call: dict[str, Any]) -> None:
    if call["index"] == len(calls):
        assert set(call) == {"index", "id", "type", "function"}
        assert set(call["function"]) == {"name", "arguments"}
        calls.append([call["type"], call["function"]["name"], call["function"]["arguments"]])
    else:
        assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
        assert call["index"] == len(calls) - 1
        calls[-1][2] += call["function"]["arguments"]


@pytest.mark.parametrize("per_step", [1, 2, 3, 5, 8, 1000])
def test_a_stream_says_what_the_whole_answer_says_however_tokens_are_grouped(
    server: Running, engine: FakeEngine, per_step: int
):
    engine.script, engine.per_step = ids_of(TWO), per_step
    whole = message(chat(server, tools=TOOLS))
    assert whole == streamed(server, tools=TOOLS)
    assert whole["reasoning"] == "Need the weather."
    assert whole["content"] == "Checking now."
    assert whole["calls"] == [
        ("function", "get_weather", '{"location": "Rome"}'),
        ("function", "f", '{"x": 1}'),
    ]
    assert whole["finish"] == "tool_calls"
    assert whole["usage"]["completion_tokens"] == len(ids_of(TWO))
    thought = {"reasoning_tokens": len(ids_of(THOUGHT))}
    assert whole["usage"]["completion_tokens_details"] == thought


FIELDS = {
    "stream": [False, True],
    "enable_thinking": [False, True],
    "skip_special_tokens": [None, True, False],
    "tools": [TOOLS, None],
}


@pytest.mark.parametrize("choice", list(itertools.product(*FIELDS.values())), ids=str)
def test_switches_change_nothing_in_the_structure(
    server: Running, engine: FakeEngine, choice: tuple[Any, ...]
):
    """Without tools there are no calls: the call is text, and still no control token shows."""
    given = dict(zip(FIELDS, choice, strict=True))
    engine.script = ids_of(V10)
    fields = {"chat_template_kwargs": {"enable_thinking": given["enable_thinking"]}}
    fields |= {k: v for k in ("skip_special_tokens", "tools") if (v := given[k]) is not None}
    said = streamed(server, **fields) if given["stream"] else message(chat(server, **fields))
    assert said["reasoning"] == "Need the weather."
    if given["tools"]:
        assert (said["content"], said["finish"]) == ("Checking now.", "tool_calls")
        assert [call[1] for call in said["calls"]] == ["get_weather"]
    else:
        assert said["content"] == 'Checking now.call:get_weather{location:"Rome"}'
        assert (said["calls"], said["finish"]) == ([], "stop")


def test_calls_stream_in_openais_shape(server: Running, engine: FakeEngine):
    """First chunk: id, type and name; later ones the index and arguments only; ids are unique."""
    call = "<|tool_call>call:f{x:%d}<tool_call|>"
    engine.script = ids_of(call % 1 + call % 2 + "<|tool_response>")
    body = {"model": MODEL, "messages": GREET, "tools": TOOLS, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        text = "".join(response.iter_text())
    chunks = [c["choices"][0] for c in parse_events(text)]
    calls = [call for c in chunks for call in c["delta"].get("tool_calls", ())]
    first = [call for call in calls if "id" in call]
    assert [call["index"] for call in first] == [0, 1]
    assert len({call["id"] for call in first}) == 2
    assert all(call["id"].startswith("call_") for call in first)
    assert '"id":null' not in text and '"name":null' not in text and '"type":null' not in text
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["tool_calls"]


@pytest.mark.parametrize(
    ("script", "finish", "calls"),
    [
        ("<|tool_call>call:now{}<tool_call|><|tool_response>", "tool_calls", 1),
        (f"{THOUGHT}4<turn|>", "stop", 0),
        ('<|tool_call>:get_weather{location:<|"|>Rome<|"|>}<tool_call|><turn|>', "tool_calls", 1),
        ("<|tool_call>call:{}<tool_call|><turn|>", "stop", 0),
        ("<|tool_call>call:f{x:1<turn|>", "tool_calls", 1),
    ],
)
def test_finish_is_tool_calls_if_and_only_if_there_are_some(
    server: Running, engine: FakeEngine, script: str, finish: str, calls: int
):
    engine.script = ids_of(script)
    for said in (message(chat(server, tools=TOOLS)), streamed(server, tools=TOOLS)):
        assert (said["finish"], len(said["calls"])) == (finish, calls)
        assert said["content"] or said["reasoning"] or said["calls"]


MALFORMED = [
    "call:f(x:1)", "call:f{a:[t:[]", "call:f{x:1", 'call:f{{"a":1}}', "call:f{a='x'}", "call:f{a=1}",
    "call:f{list:[foo,bar]}", "call:{}", ":f{x:1}", "", "}{",
]  # fmt: skip


@pytest.mark.parametrize("body", MALFORMED)
@pytest.mark.parametrize("closer", ["<tool_call|>", ""])
def test_a_malformed_call_never_vanishes(
    server: Running, engine: FakeEngine, body: str, closer: str
):
    engine.script = ids_of(f"<|tool_call>{body}{closer}{WEATHER}<|tool_response>")
    whole = message(chat(server, tools=TOOLS))
    assert whole == streamed(server, tools=TOOLS)
    assert whole["calls"][-1] == ("function", "get_weather", '{"location": "Rome"}')
    assert len(whole["calls"]) == 2 or whole["content"] or not body


def test_a_call_cut_by_max_tokens_is_length(server: Running, engine: FakeEngine):
    engine.script = ids_of(V10)
    for cut in range(len(ids_of(THOUGHT)), len(ids_of(V10))):
        whole = message(chat(server, tools=TOOLS, max_tokens=cut))
        assert whole == streamed(server, tools=TOOLS, max_tokens=cut)
        assert whole["finish"] == "length"
        assert whole["usage"]["completion_tokens"] == cut


def test_control_text_in_prose_is_prose(server: Running, engine: FakeEngine):
    sentence = "Use <|tool_call>call:x{} to call."
    engine.script = [*dialect().encode(sentence), TURN_END]
    for said in (
        chat(server, tools=TOOLS)["choices"][0],
        chat(server, tools=TOOLS, tool_choice="none")["choices"][0],
    ):
        assert said["message"]["content"] == sentence
        assert said["finish_reason"] == "stop"


def test_tool_choice_none_makes_calls_text(server: Running, engine: FakeEngine):
    engine.script = ids_of(V10)
    for read in (lambda **f: message(chat(server, **f)), lambda **f: streamed(server, **f)):
        said = read(tools=TOOLS, tool_choice="none")
        assert (said["calls"], said["finish"]) == ([], "stop")
        assert said["content"] == 'Checking now.call:get_weather{location:"Rome"}'


def test_without_parallel_calls_the_first_ends_the_answer(server: Running, engine: FakeEngine):
    engine.script = ids_of(TWO)
    for per_step in (1, 4, 1000):
        engine.per_step = per_step
        fields = {"tools": TOOLS, "parallel_tool_calls": False}
        whole = message(chat(server, **fields))
        assert whole == streamed(server, **fields)
        assert [call[1] for call in whole["calls"]] == ["get_weather"]
        assert whole["finish"] == "tool_calls"
        assert whole["usage"]["completion_tokens"] == len(ids_of(V10)) - 1


def test_nothing_after_the_result_marker_is_read_or_billed(server: Running, engine: FakeEngine):
    engine.script = ids_of(V10 + "response:get_weather{value:1}<turn|>")
    said = message(chat(server, tools=TOOLS))
    assert (said["content"], said["finish"]) == ("Checking now.", "tool_calls")
    assert said["usage"]["completion_tokens"] == len(ids_of(V10))


def test_an_exception_while_reading_ends_the_stream_with_an_error_event(
    server: Running, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    engine.script, engine.sleep = ids_of(V10), 0.002  # slow enough for the stream to have begun
    real, seen = Arguments.text, itertools.count()

    def broken(self: Arguments, text: str) -> str:
        if next(seen) == 5:
            raise ZeroDivisionError("a bug in the reader")
        return real(self, text)

    monkeypatch.setattr(Arguments, "text", broken)
    chunks = server.stream("/v1/chat/completions", messages=GREET, tools=TOOLS)
    assert set(chunks[-1]) == {"error"} and chunks[-1]["error"]["type"] == "server_error"
    assert "choices" in chunks[-2]
    monkeypatch.undo()
    assert message(chat(server, tools=TOOLS))["finish"] == "tool_calls"
    assert not server.engine.rows


def test_thought_and_stop_strings(server: Running, engine: FakeEngine):
    """A stop string is looked for in content only."""
    engine.script = ids_of("<|channel>thought\nA END B\n<channel|>C END D<turn|>")
    for stop in ("END", ["zzz", "END"]):
        whole = message(chat(server, stop=stop))
        assert whole == streamed(server, stop=stop)
        assert (whole["reasoning"], whole["content"]) == ("A END B", "C ")
        assert whole["finish"] == "stop"
    engine.script = ids_of(f"No END?{WEATHER}<|tool_response>")
    assert message(chat(server, tools=TOOLS, stop="Rome"))["finish"] == "tool_calls"
    assert message(chat(server, tools=TOOLS, stop="END"))["content"] == "No "


def test_an_unclosed_thought_is_reasoning_and_counted(server: Running, engine: FakeEngine):
    engine.script = [*ids_of("<|channel>thought\n"), *ids_of("x" * 300)]
    whole = message(chat(server, max_tokens=50))
    assert whole == streamed(server, max_tokens=50)
    assert (whole["content"], whole["finish"]) == ("", "length")
    assert whole["reasoning"] and set(whole["reasoning"]) == {"x"}
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 50
    assert chat(server, max_tokens=50)["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize(
    ("script", "streams_alike"),
    [(f"{THOUGHT}C<turn|>", True), ("R<channel|>C<turn|>", False), ("thought\nR\n<channel|>C<turn|>", False)],
)  # fmt: skip
def test_thinking_though_it_was_off(
    server: Running, engine: FakeEngine, script: str, streams_alike: bool
):
    """A whole answer moves text that turns out to be a thought; a stream has sent it and leaves it where it is."""
    engine.script = ids_of(script)
    whole, stream = message(chat(server)), streamed(server)
    assert whole["content"] == "C" and whole["reasoning"] in ("R", "Need the weather.")
    assert stream["content"].endswith("C")
    assert (stream == whole) == streams_alike
    assert stream["usage"] == whole["usage"]


def test_include_reasoning_false_leaves_the_thought_out(server: Running, engine: FakeEngine):
    engine.script = ids_of(f"{THOUGHT}4<turn|>")
    whole = message(chat(server, include_reasoning=False))
    assert (whole["content"], whole["reasoning"]) == ("4", "")
    assert whole == streamed(server, include_reasoning=False)


def test_log_probabilities_cover_thoughts_and_calls(server: Running, engine: FakeEngine):
    engine.script = ids_of(V10)
    for per_step in (1, 3, 1000):
        engine.per_step = per_step
        fields = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1}
        content = chat(server, **fields)["choices"][0]["logprobs"]["content"]
        assert len(content) == len(ids_of(V10)) - 1
        chunks = server.stream("/v1/chat/completions", messages=GREET, **fields)
        parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        assert [entry for part in parts for entry in part["content"]] == content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("f"), tool("f")]}, "tools[1]"),
        ({"tools": [tool("bad name")]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": []}}}]},
         "tools[0].function.parameters.properties"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"enable_thinking": "false"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"preserve_thinking": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{% for x in range(10**9) %}x{% endfor %}"}},
         "chat_template_kwargs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_a_bad_request(
    server: Running, fields: dict[str, Any], param: str
):
    said = error(server.post("/v1/chat/completions", messages=GREET, **fields), 400)
    assert said["type"] == "invalid_request_error"
    assert (said["param"] or "").startswith(param)


def render(server: Running, messages: Any = GREET, **fields: Any) -> dict[str, Any]:
    body = ok(server.post("/v1/chat/completions/render", messages=messages, **fields))
    assert body["prompt"] == dialect().decode(body["prompt_token_ids"], skip_special=False)
    assert body["prompt_token_ids"].count(BOS) == 1 and body["prompt_token_ids"][0] == BOS
    flagged = ok(server.post("/v1/chat/completions", messages=messages, prompt_only=True, **fields))
    assert flagged == body
    return body


def test_thinking_is_off_unless_asked_for(server: Running):
    assert "<|think|>" not in render(server)["prompt"]
    on = {"enable_thinking": True}
    assert "<|think|>" in render(server, chat_template_kwargs=on)["prompt"]
    assert "<|think|>" in render(server, reasoning_effort="high")["prompt"]
    assert "<|think|>" not in render(server, reasoning_effort="none")["prompt"]
    assert "<|think|>" in render(server, reasoning_effort="none", chat_template_kwargs=on)["prompt"]


def test_the_answer_continues_the_thought_that_the_prompt_left_open(
    server: Running, engine: FakeEngine
):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *GREET,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]
    fields = {"tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}
    assert render(server, messages, **fields)["prompt_ends_in"] == "open_channel"
    engine.script = ids_of("R text<channel|>answer<turn|>")
    for said in (
        message(chat(server, messages=messages, **fields)),
        streamed(server, messages=messages, **fields),
    ):
        assert (said["reasoning"], said["content"]) == ("R text", "answer")
    engine.script = ids_of("answer<turn|>")
    said = message(chat(server, chat_template_kwargs={"enable_thinking": True}))
    assert (said["reasoning"], said["content"]) == ("", "answer")


def test_a_prefix_with_a_thought_is_continued_without_it(server: Running, engine: FakeEngine):
    prefix = {"role": "assistant", "content": "<|channel>thought\nx\n<channel|>Once"}
    messages, fields = [*GREET, prefix], {"continue_final_message": True}
    prompt = render(server, messages, add_generation_prompt=False, **fields)
    assert prompt["prompt"].endswith("<|turn>model\nOnce")
    assert not {CHANNEL, CHANNEL_END} & set(prompt["prompt_token_ids"])
    engine.script = ids_of(" upon a time<turn|>")
    assert message(chat(server, messages=messages, **fields))["content"] == " upon a time"
    both = server.post(
        "/v1/chat/completions", messages=messages, add_generation_prompt=True, **fields
    )
    assert error(both, 400)["param"] == "continue_final_message"


def test_usage_counts_the_prompt_that_was_rendered(server: Running, engine: FakeEngine):
    """Nothing is cut from its end: the last ids are those of the result."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [
        *GREET,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ZQX-7731"},
    ]
    engine.script = [TURN_END]
    ids = render(server, messages, tools=TOOLS)["prompt_token_ids"]
    assert dialect().decode(ids[-4:], skip_special=False) == '1<|"|>}<tool_response|>'
    assert chat(server, messages=messages, tools=TOOLS)["usage"]["prompt_tokens"] == len(ids)
    assert list(server.engine.seen[-1].prompt_ids) == ids


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "content": "z"}],
        [*GREET, {"role": "tool", "tool_call_id": "unknown", "content": "z"}],
        [*GREET, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "not json"}}]}],
        [*GREET, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
        [*GREET, {"role": "assistant", "tool_calls": [{"id": "x"}]}],
        [{"role": "narrator", "content": "z"}],
    ],
)  # fmt: skip
def test_messages_at_fault_are_named(server: Running, messages: list[Any]):
    said = error(server.post("/v1/chat/completions", messages=messages), 400)
    assert said["param"].startswith(f"messages[{len(messages) - 1}]")
    assert "messages[" in said["message"]


def test_the_openai_client_chats_streams_and_makes_a_round_trip_of_two_calls(
    server: Running, engine: FakeEngine
):
    client, messages = server.openai, list[Any](GREET)
    engine.script = ids_of(TWO)
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)  # pyright: ignore
    said = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert [json.loads(c.function.arguments) for c in said.tool_calls] == [
        {"location": "Rome"},
        {"x": 1},
    ]
    messages.append(said.model_dump(exclude_none=True))
    for call, result in zip(said.tool_calls, ("sunny", "2"), strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    engine.script = ids_of("It is sunny.<turn|>")
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "It is sunny."
    prompt = dialect().decode(server.engine.seen[-1].prompt_ids, skip_special=False)
    assert prompt.endswith(
        'Checking now.<|tool_call>call:get_weather{location:<|"|>Rome<|"|>}<tool_call|>'
        "<|tool_call>call:f{x:1}<tool_call|>"
        '<|tool_response>response:get_weather{value:<|"|>sunny<|"|>}<tool_response|>'
        '<|tool_response>response:f{value:<|"|>2<|"|>}<tool_response|>'
    )
    engine.script = ids_of(TWO)
    with client.chat.completions.stream(model=MODEL, messages=GREET, tools=TOOLS) as stream:
        streamed_calls = stream.get_final_completion().choices[0].message.tool_calls
    assert [c.function.arguments for c in streamed_calls] == ['{"location": "Rome"}', '{"x": 1}']


def test_gemma_3_has_no_calls_and_no_thoughts():
    with running() as server:
        said = error(server.post("/v1/chat/completions", messages=GREET, tools=TOOLS), 400)
        assert said["param"] == "tools"
        usage = server.chat(max_tokens=2)["usage"]
        assert set(usage) == {"prompt_tokens", "completion_tokens", "total_tokens"}
        for messages in ([*GREET, *GREET], [{"role": "assistant", "content": "x"}]):
            said = error(server.post("/v1/chat/completions", messages=messages), 400)
            assert "must alternate" in said["message"]
        assert server.chat(max_tokens=1)


assert RESPONSE in dialect().eos_ids
