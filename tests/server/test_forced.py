"""Schemas and forced calls in every dialect, through the official clients, on a device that draws at random from the
masks: what comes back is the grammar's work alone.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from anthropic import Anthropic
from tests.dialect_tokenizer import dialect
from tests.fake_runner import fake_engine
from tests.server.harness import MODEL, Running, running
from tests.server.test_structured import FORMAT, SCHEMA, WANTED, vocabulary

from onechip.engine.grammar_compiler import GrammarCompiler

FUNCTION: Any = {"type": "function", "name": "f", "parameters": WANTED}
CUSTOM: Any = {"name": "f", "input_schema": WANTED}
GREET: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = fake_engine(max_seqs=8, full_pages=2048, sliding_pages=64, max_model_len=4000)
    engine.grammars = GrammarCompiler(vocabulary, engine.info.vocab_size, dialect().eos_ids)
    with running(engine, family="dialect") as it:  # type: ignore[arg-type]
        yield it


def claude(server: Running) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_holds_in_chat_completions(server: Running, seed: int):
    client: Any = server.openai.chat.completions
    answer = client.create(
        model=MODEL, messages=GREET, response_format=FORMAT, seed=seed, max_tokens=1500
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


@pytest.mark.parametrize("effort", ["none", "high"])
def test_a_schema_holds_in_responses_with_thinking_on_and_off(server: Running, effort: str):
    client: Any = server.openai.responses
    text = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}}
    answer = client.create(
        model=MODEL,
        input="hi",
        text=text,
        reasoning={"effort": effort},
        max_output_tokens=1500,
        extra_body={"seed": 3},
    )
    if answer.status == "completed":  # a random thought may never end
        jsonschema.validate(json.loads(answer.output_text), SCHEMA)
    else:
        assert effort == "high" and answer.output_text == ""


def test_a_schema_holds_in_messages(server: Running):
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer: Any = claude(server).messages.create(
        model=MODEL, max_tokens=1500, messages=GREET, output_config=config
    )
    (block,) = answer.content
    assert answer.stop_reason == "end_turn"
    jsonschema.validate(json.loads(block.text), SCHEMA)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_responses_make_the_calls_they_must(server: Running, choice: Any):
    client: Any = server.openai.responses
    answer = client.create(
        model=MODEL,
        input="hi",
        tools=[FUNCTION],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=1500,
    )
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "f")
    jsonschema.validate(json.loads(call.arguments), WANTED)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_messages_make_the_calls_they_must(server: Running, choice: Any):
    answer: Any = claude(server).messages.create(
        model=MODEL,
        max_tokens=1500,
        messages=GREET,
        tools=[CUSTOM],
        tool_choice=choice | {"disable_parallel_tool_use": True},
    )
    assert answer.stop_reason == "tool_use"
    (use,) = answer.content
    assert use.name == "f"
    jsonschema.validate(use.input, WANTED)
