"""Every probe against a server that passes it, one that fails it, one that refuses it and one that is broken."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.ladder.scripted import Say, Script, scripted

from onechip.ladder import journal, probe_schemas, probe_text, probe_tools, probes
from onechip.ladder.client import Client, Target
from onechip.ladder.journal import open_run
from onechip.ladder.probes import Probe
from onechip.ladder.progress import Silent
from onechip.ladder.record import Hardware, Model, Record, Software

ALL = [*probe_tools.probes(), *probe_schemas.probes(), *probe_text.probes()]
BOSTON = ("get_weather", '{"unit": "fahrenheit", "city": "Boston"}')
PERSON = {"name": "Ada", "born": 1815, "field": "mathematics", "alive": False}
STORY = "word " * 100


def words(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def good(body: dict[str, Any]) -> Say:
    """A capable server with a capable model."""
    content = body["messages"][-1]["content"]
    thinking = body.get("chat_template_kwargs", {}).get("enable_thinking", False)
    if "tools" in body:
        return tool_answer(body, content)
    if isinstance(content, list):
        question = content[-1]["text"]
        return Say("Red" if "What colour" in question else "Blue and green.")
    if constrained := structured(body):
        return Say(constrained, reasoning="Hm." if thinking else "")
    if "17 times" in content:
        return Say("It is 391.", reasoning="17 * 20 + 51" if thinking else "")
    if body.get("ignore_eos"):
        return Say(STORY, finish="length")
    if "Which numbers" in content:
        numbers = re.findall(r"The number of \w+ is (\d+)", content)
        return Say(", ".join(numbers), prompt_tokens=words(content))
    return Say("word", finish="length", prompt_tokens=words(content))


def tool_answer(body: dict[str, Any], content: str) -> Say:
    if body["messages"][-1]["role"] == "tool":
        return Say("It is 61 degrees and hail is falling.")
    choice = body["tool_choice"]
    if choice == "none":
        return Say("I cannot look that up.")
    if choice != "auto":
        return Say(
            calls=(("get_weather", '{"city": "Rome"}'),),
            finish="stop" if isinstance(choice, dict) else None,
        )
    if "Boston" in content:
        return Say(calls=(BOSTON,))
    if "Paris" in content:
        return Say(
            calls=(("get_weather", '{"city": "Tokyo"}'), ("get_weather", '{"city": "Paris"}'))
        )
    return Say("Where from, where to, and when?" if "flight" in content else "56")


def structured(body: dict[str, Any]) -> str:
    spelled = {
        **body.get("structured_outputs", {}),
        **{k.removeprefix("guided_"): body[k] for k in body if k.startswith("guided_")},
    }
    if "response_format" in body or "json" in spelled:
        return json.dumps(PERSON)
    if "regex" in spelled:
        return "1969-07-20"
    return spelled.get("choice", [""])[0]


def run(
    script: Script,
    which: list[Probe],
    max_model_len: int | None = 200_000,
    path: Path | None = None,
) -> Record:
    header = journal.new_header(Model(id="m"), Software(), Hardware())

    async def ask(url: str, into: journal.Journal) -> None:
        async with Client(Target(url, "scripted")) as client:
            await probes.run_all(which, client, max_model_len, into, Silent())

    assert path is not None
    with scripted(script) as server, open_run(path, header, resume=True) as into:
        asyncio.run(ask(server.url, into))
        return into.record


def verdicts(record: Record) -> dict[str, str]:
    return {probe.name: probe.verdict for probe in record.probes}


def test_the_published_probes_are_all_there():
    domains: dict[str, int] = {}
    for probe in ALL:
        domains[probe.domain] = domains.get(probe.domain, 0) + 1
    assert domains == {
        "tools": 8,
        "schemas": 16,
        "reasoning": 2,
        "greedy": 2,
        "context": 6,
        "pictures": 2,
    }
    assert len({(p.domain, p.name) for p in ALL}) == len(ALL)


def test_a_capable_server_passes_everything(tmp_path: Path):
    record = run(good, ALL, path=tmp_path / "r.json")
    assert {p.name: p.detail for p in record.probes if p.verdict != "pass"} == {}
    assert all(p.latency_s is not None and p.latency_s >= 0 for p in record.probes)


def test_a_server_without_these_features_is_unsupported_and_not_in_error(tmp_path: Path):
    record = run(lambda _: Say("not here", status=400), ALL, path=tmp_path / "r.json")
    assert set(verdicts(record).values()) == {"unsupported"}
    assert {p.detail for p in record.probes} == {"400: not here"}


@pytest.mark.parametrize("status", [401, 429, 500, 503])
def test_a_broken_server_is_in_error(tmp_path: Path, status: int):
    record = run(lambda _: Say("broken", status=status), ALL[:2], path=tmp_path / "r.json")
    assert set(verdicts(record).values()) == {"error"}


def test_only_errors_are_tried_again(tmp_path: Path):
    path = tmp_path / "r.json"
    broken = run(
        lambda body: good(body) if "Boston" in str(body) else Say("broken", status=500),
        ALL[:3],
        path=path,
    )
    assert list(verdicts(broken).values()) == ["pass", "pass", "error"]
    asked: list[str] = []

    def script(body: dict[str, Any]) -> Say:
        asked.append(body["messages"][-1]["content"])
        return good(body)

    again = run(script, ALL[:3], path=path)
    assert asked == ["What is 7 times 8? Answer with the number alone."]
    assert list(verdicts(again).values()) == ["pass"] * 3


def ignoring(*fields: str) -> Script:
    return lambda body: good({k: v for k, v in body.items() if k not in fields})


def always(said: Say) -> Script:
    return lambda _: said


def weather(*arguments: str, finish: str | None = None) -> Script:
    return always(Say(calls=tuple(("get_weather", each) for each in arguments), finish=finish))


def forgetful(body: dict[str, Any]) -> Say:
    return Say("I do not remember.", prompt_tokens=words(body["messages"][-1]["content"]))


BAD: list[tuple[str, Script, str]] = [
    ("one call, optional argument inferred", weather('{"city": "Boston"}'), "1 calls where"),
    ("one call, optional argument inferred", weather('{"city": "Boston", "unit": "celsius"}'), "1 calls where"),
    ("one call, optional argument inferred", weather(BOSTON[1], BOSTON[1]), "2 calls where"),
    ("one call, optional argument inferred", weather('{"city": "Bos'), "no JSON object"),
    ("one call, optional argument inferred", weather(BOSTON[1], finish="stop"), "finish reason"),
    ("one call, optional argument inferred", always(Say(calls=(("weather", BOSTON[1]),))), "called 'weather'"),
    ("one call, optional argument inferred", always(Say("<|tool_call>call:get_weather{}")), "0 calls where"),
    ("answer from a result", always(Say("It is warm.")), "61, hail is not in the text"),
    ("answer from a result", weather('{"city": "Boston"}'), "it called a tool"),
    ("restraint", weather('{"city": "56"}'), "it called a tool"),
    ("restraint", always(Say("<|channel>thought\n<channel|>56")), "control text"),
    ("parallel calls", weather('{"city": "Paris"}'), "1 calls where"),
    ("asks when underspecified", always(Say(calls=(("book_flight", "{}"),))), "it called a tool"),
    ("asks when underspecified", always(Say("Booked.")), "it asked nothing back"),
    ("tool_choice required", always(Say("Good morning!")), "it called nothing"),
    ("tool_choice named", weather("{}"), "no call of get_weather"),
    ("tool_choice none", weather('{"city": "Paris"}'), "it called a tool"),
    *[(f"{name}, thinking {on}", always(Say("Ada Lovelace was a mathematician.")), "the text")
      for name, *_ in probe_schemas.SPELLINGS for on in ("off", "on")],
    ("response_format json_schema, thinking off", always(Say(json.dumps({**PERSON, "born": "1815"}))), "a value"),
    ("response_format json_schema, thinking off", always(Say(json.dumps({**PERSON, "born": True}))), "a value"),
    ("response_format json_schema, thinking off", always(Say(json.dumps({**PERSON, "more": 1}))), "keys"),
    ("response_format json_schema, thinking off", always(Say(f"```json\n{json.dumps(PERSON)}\n```")), "no object"),
    ("guided_json, thinking off", always(Say('{"name": "A', finish="length")), "cut by max_tokens"),
    ("guided_regex, thinking off", always(Say("1969-07-20.")), "does not match"),
    ("split from the answer, thinking on", always(Say("17*23 ... it is 391")), "no reasoning came"),
    ("split from the answer, thinking on", always(Say("390", reasoning="hm")), "391 is not"),
    ("none with thinking off", always(Say("391", reasoning="hm")), "thinking is off"),
    ("recall in 2048 tokens", forgetful, "is not in the text"),
    ("colour of one", always(Say("Blue")), "red is not in the text"),
    ("two in order", always(Say("green, blue")), "blue, then green"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "script", "complaint"), BAD, ids=[f"{i} {row[0]}" for i, row in enumerate(BAD)]
)
def test_a_failing_answer_fails_its_probe_and_says_why(
    tmp_path: Path, name: str, script: Script, complaint: str
):
    which = [probe for probe in ALL if probe.name == name]
    assert len(which) == 1
    (probe,) = run(script, which, path=tmp_path / "r.json").probes
    assert probe.verdict == "fail", probe.detail
    assert complaint in probe.detail


@pytest.mark.parametrize(
    "field",
    ["response_format", "guided_json", "structured_outputs", "guided_regex", "guided_choice"],
)
def test_a_constraint_that_is_accepted_and_ignored_is_a_fail(tmp_path: Path, field: str):
    which = [p for p in probe_schemas.probes() if p.name.startswith(field)]
    assert which
    assert set(verdicts(run(ignoring(field), which, path=tmp_path / "r.json")).values()) == {"fail"}


def test_greedy_texts_that_differ_tell_how_far_they_agree(tmp_path: Path):
    count = iter(range(100))

    def script(body: dict[str, Any]) -> Say:
        differs = next(count) // 4 if body["max_tokens"] > 1 else 0
        return Say(STORY + str(differs), finish="length")

    which = [p for p in ALL if p.domain == "greedy"]
    alone, batch = run(script, which, path=tmp_path / "r.json").probes
    assert alone.verdict == "pass"
    assert batch.verdict == "fail"
    assert "1 of 4 repeats differ; all agree for 500 of 501 characters" in batch.detail


def test_a_short_server_is_asked_for_less(tmp_path: Path):
    asked: list[int] = []

    def script(body: dict[str, Any]) -> Say:
        asked.append(body["max_tokens"])
        return good(body)

    run(script, probe_schemas.probes(), max_model_len=1000, path=tmp_path / "r.json")
    assert set(asked) == {256, 500}


def test_contexts_beyond_the_servers_length_are_unsupported(tmp_path: Path):
    which = [p for p in ALL if p.domain == "context"]
    record = run(good, which, max_model_len=10_000, path=tmp_path / "r.json")
    found = verdicts(record)
    assert found["recall in 8192 tokens"] == "pass"
    assert found["recall in 14336 tokens"] == "unsupported"
    assert "the server takes 10000 tokens" in record.probes[-1].detail


def test_a_context_has_about_the_size_it_is_named_for(tmp_path: Path):
    sizes: list[int] = []

    def script(body: dict[str, Any]) -> Say:
        sizes.append(words(body["messages"][-1]["content"]))
        return good(body)

    run(script, [p for p in ALL if p.domain == "context"], path=tmp_path / "r.json")
    for size, wanted in zip(sizes[2::3], probe_text.RECALL_SIZES, strict=True):
        assert wanted - 2 * probe_text.RECALL_ROOM < size < wanted


def test_needles_lie_at_their_depths_and_each_once():
    text, codes = probe_text.haystack(1000, 1)
    assert len(set(codes.values())) == 3
    for depth, number in zip(probe_text.NEEDLES, codes.values(), strict=True):
        assert text.count(number) == 1
        assert abs(text.index(number) / len(text) - depth) < 0.02


def test_a_picture_is_a_png_of_one_colour():
    data = probe_text.png(1, 2, 3)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert probe_text.zlib.decompress(data[data.index(b"IDAT") + 4 : -16])[1:4] == b"\1\2\3"
