"""A conversation as data: settings, commands, retries, and files that come back as they went."""

import json
from pathlib import Path

import pytest

from onechip.errors import InvalidRequest, StartupError
from onechip.terminal.chat import read_message
from onechip.terminal.client import server_at
from onechip.terminal.commands import COMMANDS, run
from onechip.terminal.screen import safe
from onechip.terminal.session import NAMES, Session, Stats


def session() -> Session:
    return Session(
        "m", messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )


def typed(*lines: str):
    """What `input` gives for these lines."""
    left = list(lines)
    return lambda _: left.pop(0)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("hello",), "hello"),
        (("one\\", "two\\", "three"), "one\ntwo\nthree"),
        (('"""', "one", "", "  two", '"""'), "one\n\n  two"),
        (('"""one', 'two"""'), "one\ntwo"),
        (("  ",), ""),
    ],
)
def test_a_message_may_have_many_lines(lines: tuple[str, ...], message: str):
    assert read_message(typed(*lines)) == message


def test_settings_go_into_the_request_and_out_again():
    chat = session()
    for line in (
        "set temperature 0.2",
        "set top_k 5",
        "set stop a\\nb",
        "system Be brief.",
        "thinking on",
    ):
        run(chat, f"/{line}")
    body = chat.body()
    assert (body["temperature"], body["top_k"], body["stop"]) == (0.2, 5, ["a\nb"])
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["chat_template_kwargs"] == {"enable_thinking": True}
    for line in ("set temperature", "set top_k", "set stop", "system none", "thinking off"):
        run(chat, f"/{line}")
    assert chat.body() == session().body()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/nonsense", "/help"),
        ("/set heat 1", "temperature"),
        ("/set temperature hot", "a number"),
        ("/set top_k 1.5", "a whole number"),
        ("/thinking maybe", "on or off"),
        ("/save", "FILE"),
        ("/load /nonexistent/x.json", "cannot read"),
        ("/save /nonexistent/x.json", "cannot write"),
    ],
)
def test_a_wrong_command_says_what_would_be_right(line: str, told: str):
    chat = session()
    with pytest.raises(InvalidRequest, match=told.replace("/", "\\/")):
        run(chat, line)
    assert chat == session()


def test_help_names_every_command_and_every_command_answers(tmp_path: Path):
    text = run(session(), "/help").text
    for command in COMMANDS:
        name = command.name.split("|")[0]
        assert f"/{name}" in text
        argument = {"save": str(tmp_path / "x"), "load": str(tmp_path / "x")}.get(name, "")
        run(session(), f"/{name} {argument}".strip())
    assert all(name in run(session(), "/set").text for name in NAMES)


def test_a_saved_conversation_comes_back_with_its_system_prompt(tmp_path: Path):
    path = tmp_path / "c.json"
    first = session()
    first.system = "Sei kurz – ja."
    run(first, f"/save {path}")
    second = Session("m")
    run(second, f"/load {path}")
    assert (second.system, second.messages) == (first.system, first.messages)
    assert json.loads(path.read_text(encoding="utf-8"))["messages"][0]["role"] == "system"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"messages": 1}', '{"messages": [{"role": "tool", "content": "x"}]}', "{"]
)
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path: Path, text: str):
    path = tmp_path / "c.json"
    path.write_text(text)
    chat = session()
    with pytest.raises(InvalidRequest):
        run(chat, f"/load {path}")
    assert chat == session()


def test_a_message_without_an_answer_is_set_aside_until_it_is_retried():
    chat = session()
    chat.messages.append({"role": "user", "content": "c"})
    chat.finish("", Stats())
    assert chat.messages == session().messages
    assert run(chat, "/retry").then == "answer"
    assert chat.messages[-1] == {"role": "user", "content": "c"}
    chat.finish("d", Stats())
    run(chat, "/retry")
    assert [m["content"] for m in chat.messages] == ["a", "b", "c"]
    run(chat, "/clear")
    with pytest.raises(InvalidRequest, match="nothing"):
        run(chat, "/retry")


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://h", "http://h/v1"),
        ("http://h/v1/", "http://h/v1"),
        ("https://h:1/openai/v1", "https://h:1/openai/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_an_address_may_be_short(url: str, base: str):
    assert server_at(url, None).base == base


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "http://h:99999"])
def test_a_wrong_address_is_named(url: str):
    with pytest.raises(StartupError, match="not an address"):
        server_at(url, None)


def test_what_a_model_says_cannot_steer_the_terminal():
    assert safe("a\x1b[2Jb\x9b31m\x07\x08c\rd\u202ee") == "a[2Jb31mcde"
    assert safe("tab\tline\nä日😊") == "tab\tline\nä日😊"


def test_stats_are_one_line():
    assert (
        Stats(1024, 101, 0.5, 3.0).line()
        == "101 tokens, 40.0 tokens/s, first after 0.50 s, prompt 1,024 tokens"
    )
    assert Stats().line() == "no answer yet"
