"""`LLM.chat` without a device: prompts, thoughts and calls of a scripted engine."""

from collections import deque
from itertools import count
from typing import Any

import pytest
from tests.dialect_tokenizer import dialect, ids_of
from tests.fakes import FakeEngine
from tests.server.test_dialect import TOOLS, TWO, V10

from onechip.errors import InvalidRequest
from onechip.llm import LLM, Completion
from onechip.request import SamplingParams


class Checkpoint:
    source, chat_template = "scripted", None


class Config:
    ple_dim, eos_ids = 0, (1, 106, 50)


class Scheduler:
    def __init__(self) -> None:
        self.waiting = deque[Any]()


def scripted(text: str) -> LLM:
    """An LLM over an engine that says `text`."""
    llm = LLM.__new__(LLM)
    engine = FakeEngine(script=ids_of(text), vocab_size=dialect().vocab_size, max_model_len=4096)
    vars(engine)["scheduler"] = Scheduler()
    vars(llm).update(
        engine=engine, tokenizer=dialect(), config=Config(), _checkpoint=Checkpoint(), _ids=count()
    )
    return llm


HI = [{"role": "user", "content": "hi"}]


def test_a_chat_has_thought_text_and_calls():
    said = scripted(TWO).chat(HI, tools=TOOLS, enable_thinking=True)
    assert (said.reasoning, said.text) == ("Need the weather.", "Checking now.")
    assert said.finish_reason == "tool_calls"
    calls = [(call.name, call.arguments) for call in said.tool_calls]
    assert calls == [("get_weather", '{"location": "Rome"}'), ("f", '{"x": 1}')]
    assert list(said.token_ids) == ids_of(TWO)


def test_without_tools_a_call_is_text():
    said = scripted(V10).chat(HI, SamplingParams(max_tokens=500))
    assert (said.finish_reason, said.tool_calls) == ("stop", ())
    assert said.text == 'Checking now.call:get_weather{location:"Rome"}'


def test_tools_are_checked_and_declared():
    llm = scripted("ok<turn|>")
    assert isinstance(llm.chat(HI, tools=TOOLS), Completion)
    prompt = dialect().decode(llm.engine.seen[-1].prompt_ids, skip_special=False)  # pyright: ignore
    assert prompt.count("<|tool>declaration:") == 2
    with pytest.raises(InvalidRequest, match="declared twice"):
        llm.chat(HI, tools=[*TOOLS, *TOOLS])


def test_a_plain_completion_is_not_read():
    text = scripted(f"{V10}").generate(["x"], SamplingParams(max_tokens=500))[0]
    assert text.text.startswith("thought\nNeed the weather.\nChecking now.call:")
    assert (text.reasoning, text.tool_calls) == ("", ())
