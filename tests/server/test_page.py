"""The web page: its files and headers, and what a person meets in a real browser over the real server."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect
from tests.dialect_tokenizer import dialect, ids_of
from tests.fakes import FakeEngine
from tests.server.desk import browser_test
from tests.server.harness import running, until
from tests.tiny_tokenizer import TURN_END, byte_ids

from onechip.config import ServerConfig
from onechip.server.web import page_files

PAGE = Path(__file__).parents[2] / "src" / "onechip" / "server" / "page"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City"}},
        },
    },
}


# Files and headers


def test_every_file_is_served_with_its_type_and_the_policy():
    with running() as server:
        for file in page_files():
            answer = server.http.get(file.path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(file.media_type)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "'unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_known_file_is_not_sent_again():
    with running() as server:
        first = server.http.get("/")
        tag = first.headers["etag"]
        assert (
            server.http.get("/", headers={"if-none-match": f'"other", W/{tag}'}).status_code == 304
        )
        assert server.http.get("/", headers={"if-none-match": '"other"'}).content == first.content
        assert server.http.head("/").headers["etag"] == tag


def test_the_page_and_its_status_need_no_key_and_the_api_does():
    with running(config=ServerConfig(api_keys=("secret",))) as server:
        assert {server.http.get(file.path).status_code for file in page_files()} == {200}
        assert server.http.get("/page/status").json()["state"] == "ready"
        assert server.http.get("/v1/models").status_code == 401
        assert server.http.get("/page/none.js").status_code in (401, 404)


def test_nothing_in_the_page_names_another_origin():
    """Addresses in the sources are XML names or patterns that match addresses in text."""
    for path in PAGE.iterdir():
        for address in re.findall(r"https?://[\w.]+", path.read_text()):
            assert address == "http://www.w3.org", (path.name, address)


def test_page_sources_are_short_and_never_set_markup():
    for path in PAGE.iterdir():
        source = path.read_text()
        assert len(source.splitlines()) < 400, path.name
        assert not re.search(
            r"\.(inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(", source
        )
        assert "style=" not in source, "the policy forbids style attributes"


# A browser


def said(words: str) -> FakeEngine:
    return FakeEngine(script=[*byte_ids(words), TURN_END], sleep=0.01, max_model_len=4096)


@pytest.mark.browser
@browser_test[1]
def test_the_screenshots_of_the_documentation_can_be_taken_anew(browser: Browser, tmp_path: Path):
    from tests import screenshots  # which needs this module

    screenshots.take(browser, tmp_path)
    taken = {path.name for path in tmp_path.iterdir()}
    assert taken == {path.name for path in (PAGE.parents[3] / "docs").glob("page-*.png")}


class TestOverTheRealServer:
    pytestmark = browser_test

    def test_an_answer_streams_as_markdown_with_its_numbers(self, desk: Any):
        with running(said("Hello **world**, `code`.")) as server:
            d = desk(server.url)
            d.ask("hi")
            answer = d.done()
            expect(answer.locator("strong")).to_have_text("world")
            expect(answer.locator(".prose code")).to_have_text("code")
            expect(answer.locator(".meta")).to_contain_text("25 tokens")
            expect(answer.locator(".meta")).to_contain_text("tokens/s")
            expect(answer.locator(".meta")).to_contain_text("first after")
            expect(d.page.locator("#announce")).to_contain_text("Hello")

    @pytest.mark.parametrize("way", ["button", "escape", "leave"])
    def test_stopping_aborts_the_request(self, desk: Any, way: str):
        with running(
            FakeEngine(max_model_len=100_000, sleep=0.01, script=byte_ids("abc "))
        ) as server:
            d = desk(server.url)
            d.ask("hi")
            expect(d.answer.locator(".prose")).to_contain_text("abc")
            if way == "leave":
                d.page.goto("about:blank")
            else:
                d.page.click("#stop") if way == "button" else d.page.keyboard.press("Escape")
                expect(d.done().locator(".meta")).to_contain_text("stopped")
                expect(d.answer.locator(".prose")).to_contain_text("abc")
            until(lambda: not server.engine.rows and len(server.engine.aborted) == 1)

    def test_what_was_said_is_sent_again_and_survives_a_reload(self, desk: Any):
        with running(said("Yes.")) as server:
            d = desk(server.url)
            d.ask("first")
            d.done()
            d.page.reload()
            expect(d.answer).to_contain_text("Yes.")
            d.ask("second")
            d.done()
            first, second = (request.prompt_ids for request in server.engine.seen)
            assert second[: len(first)] == first, "the conversation goes on where it was"
            assert len(second) > len(first) + len("Yes.second")
            d.page.click("#new")
            expect(d.page.locator("#welcome")).to_be_visible()
            d.page.reload()
            expect(d.page.locator(".answer")).to_have_count(0)

    def test_a_server_that_loads_says_so_and_takes_the_message_when_it_is_ready(self, desk: Any):
        hold = threading.Event()
        with running(said("Here."), hold_engine=hold) as server:
            d = desk(server.url)
            expect(d.page.locator("#notice")).to_contain_text("loading")
            d.page.fill("#prompt", "hi")
            expect(d.page.locator("#send")).to_be_disabled()
            hold.set()
            expect(d.page.locator("#send")).to_be_enabled()
            expect(d.page.locator("#notice")).to_be_hidden()
            d.page.press("#prompt", "Enter")
            expect(d.done()).to_contain_text("Here.")

    def test_an_engine_that_dies_and_a_server_that_goes_are_told_apart(self, desk: Any):
        with running(FakeEngine(break_at=30, sleep=0.01, max_model_len=4096)) as server:
            d = desk(server.url)
            d.expected = "Failed to load resource|ERR_"
            d.ask("hi")
            expect(d.done().locator(".failed")).to_be_visible()
            until(lambda: server.outcome, 10)
        expect(d.page.locator("#notice")).to_contain_text("cannot be reached", timeout=15_000)
        expect(d.page.locator("#send")).to_be_disabled()

    def test_a_full_queue_offers_to_try_again(self, desk: Any):
        engine = FakeEngine(max_seqs=1, max_waiting=0, sleep=0.01, max_model_len=4096)
        engine.max_waiting = 1
        with running(engine) as server:
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "x"}],
                "stream": True,
                "ignore_eos": True,
            }
            streams = [
                server.http.send(
                    server.http.build_request("POST", "/v1/chat/completions", json=body),
                    stream=True,
                )
                for _ in range(1)
            ]
            held = threading.Thread(target=lambda: _wait(server.url, body))
            held.start()
            until(lambda: server.client.stats.waiting == 1)
            d = desk(server.url)
            d.expected = "Failed to load resource"
            d.ask("hi")
            expect(d.done().locator(".failed h4")).to_have_text("The server is busy")
            for stream in streams:
                stream.close()
            held.join()
            d.press("Try again")
            expect(d.answer.locator(".prose")).not_to_be_empty()
            expect(d.page.locator(".failed")).to_have_count(0)
            d.page.keyboard.press("Escape")

    def test_a_key_is_asked_for_where_it_is_typed(self, desk: Any):
        with running(said("In."), config=ServerConfig(api_keys=("secret",))) as server:
            d = desk(server.url)
            d.expected = "401"
            expect(d.page.get_by_label("API key")).to_be_focused()
            expect(d.page.locator("#notice")).to_contain_text("API key")
            d.ask("hi")
            expect(d.done().locator(".failed h4")).to_have_text("An API key is needed")
            d.page.fill("[type=password]", "secret")
            d.page.press("[type=password]", "Tab")
            expect(d.page.locator("#notice")).to_be_hidden()
            d.press("Try again")
            expect(d.done()).to_contain_text("In.")

    def test_thoughts_calls_and_results_make_the_whole_round(self, desk: Any):
        call = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>'
        engine = FakeEngine(max_model_len=8192, sleep=0.002)
        engine.script = ids_of(
            f"<|channel>thought\nAsk the *tool*.\n<channel|>{call}<|tool_response>"
        )
        with running(engine, family="dialect") as server:
            d = desk(server.url)
            d.page.click("#thinking")
            d.setting("Tools, as JSON").fill(json.dumps([WEATHER]))
            d.ask("weather in Rome?")
            d.done()
            expect(d.page.locator(".thought summary")).to_contain_text("Thought")
            expect(d.page.locator(".thought .prose")).to_be_hidden()
            expect(d.page.locator(".call .name")).to_have_text("get_weather")
            expect(d.page.locator(".call pre")).to_contain_text('"city": "Rome"')
            engine.script = ids_of("24 degrees.<turn|>")
            d.page.get_by_label("Result of get_weather").fill("24 C")
            d.press("Send result")
            expect(d.done()).to_contain_text("24 degrees.")
            first, second = (
                dialect().decode(r.prompt_ids, skip_special=False) for r in engine.seen
            )
            assert "<|think|>" in first and "declaration:get_weather" in first
            assert call in second and "24 C" in second

    def test_queue_and_cache_use_are_shown(self, desk: Any):
        engine = FakeEngine(max_model_len=100_000, sleep=0.01, max_seqs=4)
        with running(engine) as server:
            d = desk(server.url)
            d.ask("hi")
            expect(d.page.locator("#running")).to_have_text("1")
            expect(d.page.locator("#kv-text")).to_have_text("25%")
            d.page.keyboard.press("Escape")
            expect(d.page.locator("#running")).to_have_text("0", timeout=12_000)

    def test_sampling_is_sent_as_it_was_set(self, desk: Any):
        with running(said("Ok.")) as server:
            d = desk(server.url)
            values = {
                "Temperature": "0.3",
                "Top p": "0.9",
                "Top k": "7",
                "Min p": "0.05",
                "Max tokens": "2",
                "Seed": "11",
            }
            for label, value in values.items():
                d.setting(label).fill(value)
            d.ask("hi")
            expect(d.done().locator(".meta")).to_contain_text("cut at the token limit")
            sampling = server.engine.seen[0].sampling
            got = (
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
                sampling.min_p,
                sampling.max_tokens,
                sampling.seed,
            )
            assert got == (0.3, 0.9, 7, 0.05, 2, 11)

    def test_a_value_out_of_range_comes_back_as_the_servers_words(self, desk: Any):
        with running(said("Ok.")) as server:
            d = desk(server.url)
            d.expected = "400"
            d.setting("Temperature").fill("9")
            d.ask("hi")
            failed = d.done().locator(".failed")
            expect(failed.locator("h4")).to_have_text("The server refused the request")
            expect(failed.locator(".detail")).to_contain_text("temperature")
            d.press("Open settings")
            expect(d.setting("Temperature")).to_be_focused()


def _wait(url: str, body: dict[str, Any]) -> None:
    """A request that waits in the queue, gets its place when the first one goes, and goes itself."""
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={**body, "max_tokens": 3}, timeout=30
    ) as answer:
        answer.read()
