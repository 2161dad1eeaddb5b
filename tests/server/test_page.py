"""The web page: its files and headers, and what a person meets in a real browser over the real server."""

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from tests.dialect_tokenizer import dialect, ids_of
from tests.fakes import FakeEngine
from tests.scripted import Answer, calls, pieces, refusal, scripted, text, thought
from tests.server.harness import running, until
from tests.tiny_tokenizer import TURN_END, byte_ids

from onechip.config import ServerConfig
from onechip.server.web import page_files

PAGE = Path(__file__).parents[2] / "src" / "onechip" / "server" / "page"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
browser_test = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no chromium; on Debian: apt-get install --no-install-recommends chromium",
    ),
]
DESK = {"width": 1180, "height": 820}
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
PHONE = {"width": 390, "height": 844}


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


@dataclass
class Desk:
    """A browser's page at a server, and what went wrong in it. `expected`: console errors a test means to cause."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    expected: str = "$^"

    def open(self) -> "Desk":
        self.page.goto(self.url)
        return self

    def ask(self, words: str) -> None:
        self.page.fill("#prompt", words)
        expect(self.page.locator("#send")).to_be_enabled()
        self.page.press("#prompt", "Enter")

    @property
    def answer(self) -> Locator:
        return self.page.locator(".answer").last

    def done(self) -> Locator:
        expect(self.answer).to_have_attribute("aria-busy", "false", timeout=20_000)
        return self.answer

    def setting(self, label: str) -> Locator:
        if not self.page.locator("#settings").is_visible():
            self.page.click("#open-settings")
        return self.page.get_by_label(label, exact=True)

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name).click()

    def check(self) -> None:
        assert [error for error in self.errors if not re.search(self.expected, error)] == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def desk(browser: Browser) -> Iterator[Any]:
    """Opens pages at servers; afterwards none may have had an error or a request to another origin."""
    opened: list[Desk] = []

    def at(url: str, **options: Any) -> Desk:
        context = browser.new_context(viewport=options.pop("viewport", DESK), **options)
        context.set_default_timeout(15_000)
        desk = Desk(context.new_page(), url)
        desk.page.on("pageerror", lambda error: desk.errors.append(str(error)))
        desk.page.on(
            "console", lambda m: m.type in ("error", "warning") and desk.errors.append(m.text)
        )
        desk.page.on("request", lambda r: r.url.startswith(url) or desk.errors.append(r.url))
        opened.append(desk)
        return desk.open()

    yield at
    for each in opened:
        each.page.context.close()
        each.check()


def said(words: str) -> FakeEngine:
    return FakeEngine(script=[*byte_ids(words), TURN_END], sleep=0.002, max_model_len=4096)


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


class TestThinkingAndTools:
    """Over scripted answers, in the shape of the streams of vLLM and of this server."""

    pytestmark = browser_test

    def test_thinking_is_asked_for_and_folded(self, desk: Any):
        with scripted(thought("Let me *see* what it is.", "Done.", pause=0.1)) as server:
            d = desk(server.url)
            d.page.click("#thinking")
            d.ask("hi")
            expect(d.page.locator(".thought.live summary")).to_contain_text("Thinking")
            d.done()
            expect(d.page.locator(".thought .prose")).to_be_hidden()
            d.page.click(".thought summary")
            expect(d.page.locator(".thought .prose em")).to_have_text("see")
            expect(d.answer.locator(":scope .parts > .prose")).to_have_text("Done.")
            assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}
            d.ask("again")
            d.done()
            assert "reasoning_content" not in server.bodies[1]["messages"][1]

    def test_calls_are_shown_and_their_results_go_back(self, desk: Any):
        big = {"id": 12345678901234567890, "place": 'a "b" {c}'}
        asked = calls(
            ("lookup", {"city": "Lisbon"}),
            ("by_id", big),
            before=[{"reasoning_content": "I look."}],
        )
        with scripted(asked, text("24 degrees.")) as server:
            d = desk(server.url)
            d.setting("Tools, as JSON")
            d.page.locator("section", has_text="Functions the model").get_by_text(
                "Insert an example"
            ).click()
            expect(d.page.locator("#tools-chip")).to_contain_text("1 tool")
            d.ask("weather?")
            d.done()
            expect(d.page.locator(".call .name")).to_have_text(["lookup", "by_id"])
            expect(d.page.locator(".call pre").nth(1)).to_contain_text("12345678901234567890")
            expect(d.page.get_by_label("Result of lookup")).to_be_focused()
            d.page.get_by_label("Result of lookup").fill("24")
            d.page.get_by_label("Result of by_id").fill("x")
            d.press("Send results")
            expect(d.done()).to_contain_text("24 degrees.")
            assert server.bodies[0]["tools"][0]["function"]["name"] == "get_weather"
            _, answer, *results = server.bodies[1]["messages"]
            assert answer["reasoning_content"] == "I look." and answer["content"] is None
            assert [call["id"] for call in answer["tool_calls"]] == ["call_0", "call_1"]
            assert [(r["tool_call_id"], r["content"]) for r in results] == [
                ("call_0", "24"),
                ("call_1", "x"),
            ]
            d.page.reload()
            expect(d.page.locator(".result pre")).to_have_text(["24", "x"])

    def test_a_call_that_nobody_answers_is_not_sent_again(self, desk: Any):
        with scripted(calls(("f", {"x": 1})), text("Ok.")) as server:
            d = desk(server.url)
            d.ask("call")
            d.done()
            d.ask("never mind")
            d.done()
            expect(d.page.locator(".result")).to_have_count(0)
            assert [m["role"] for m in server.bodies[1]["messages"]] == ["user", "user"]

    def test_a_pause_shows_all_that_has_come(self, desk: Any):
        """A slow drawing puts off the next one, not for ever."""
        deltas = [
            {"content": piece}
            for piece in pieces("| a | b |\n|---|---|\n" + "| x | y |\n" * 400, 8)
        ]
        with scripted(Answer([*deltas, {"content": "| last | z |"}], hold=20)) as server:
            d = desk(server.url)
            d.ask("hi")
            expect(d.answer.locator("td", has_text="last")).to_be_visible()
            expect(d.answer).to_have_attribute("aria-busy", "true")
            d.page.keyboard.press("Escape")
            d.done()

    def test_answering_again_replaces_the_answer(self, desk: Any):
        with scripted(text("One."), text("Two.")) as server:
            d = desk(server.url)
            d.ask("hi")
            d.done()
            d.page.get_by_label("Answer again").click()
            expect(d.done()).to_contain_text("Two.")
            expect(d.page.locator(".answer")).to_have_count(1)
            assert server.bodies[0]["messages"] == server.bodies[1]["messages"]

    def test_editing_an_earlier_message_starts_from_there(self, desk: Any):
        with scripted(text("Ok.")) as server:
            d = desk(server.url)
            for words in ("one", "two"):
                d.ask(words)
                d.done()
            d.page.press("#prompt", "ArrowUp")
            expect(d.page.locator("#prompt")).to_have_value("two")
            d.page.keyboard.press("Escape")
            expect(d.page.locator("#prompt")).to_have_value("")
            d.page.locator(".user").first.hover()
            d.page.get_by_label("Edit and send again").first.click()
            d.ask("three")
            d.done()
            assert [m["content"] for m in server.bodies[-1]["messages"]] == ["three"]
            expect(d.page.locator("#log > li")).to_have_count(2)

    def test_a_schema_is_checked_before_it_is_sent_and_its_answer_is_json(self, desk: Any):
        with scripted(text('{"title":"A","year":20000000000000000001,"tags":[]}')) as server:
            d = desk(server.url)
            d.setting("Format").select_option("schema")
            d.setting("Schema").fill('{"type": ')
            expect(d.page.locator(".problem", has_text="Not JSON")).to_be_visible()
            d.ask("hi")
            expect(d.setting("Schema")).to_be_focused()
            assert server.bodies == []
            d.page.get_by_text("Insert an example").last.click()
            expect(d.page.locator("#format-chip")).to_contain_text("JSON schema")
            d.page.press("#prompt", "Enter")
            expect(d.done().locator(".code code")).to_contain_text('"year": 20000000000000000001')
            sent = server.bodies[0]["response_format"]
            assert (
                sent["type"] == "json_schema" and sent["json_schema"]["schema"]["type"] == "object"
            )

    def test_a_refused_schema_leads_to_its_box(self, desk: Any):
        refused = refusal(
            400, "uniqueItems cannot be enforced", "invalid_value", "response_format.json_schema"
        )
        with scripted(refused) as server:
            d = desk(server.url)
            d.expected = "400"
            d.setting("Format").select_option("schema")
            d.page.get_by_text("Insert an example").last.click()
            d.ask("hi")
            expect(d.done().locator(".detail")).to_have_text("uniqueItems cannot be enforced")
            d.press("Open settings")
            expect(d.setting("Schema")).to_be_focused()

    @pytest.mark.parametrize(
        ("answer", "title"),
        [
            (refusal(429, "limit", "rate_limited"), "The server is busy"),
            (refusal(503, "full", "queue_full"), "The server is busy"),
            (refusal(500, "bug", "internal"), "The server failed"),
            (Answer([{"content": "Half"}], cut=True), "The answer broke off"),
            (
                Answer([{"content": "Half"}], error={"message": "m", "code": "engine_unavailable"}),
                "The engine has stopped",
            ),
        ],
    )
    def test_every_failure_has_a_name_and_a_way_on(self, desk: Any, answer: Answer, title: str):
        with scripted(answer, text("Back.")) as server:
            d = desk(server.url)
            d.expected = "status of"
            d.ask("hi")
            expect(d.done().locator(".failed h4")).to_have_text(title)
            expect(d.page.locator("#announce")).to_have_text("The answer failed.")
            d.press("Try again")
            expect(d.done()).to_contain_text("Back.")
            assert server.bodies[-1]["messages"] == [{"role": "user", "content": "hi"}]


class TestKeysAndSizes:
    pytestmark = browser_test

    def test_everything_works_from_the_keyboard(self, desk: Any):
        with scripted(text("Ok."), calls(("f", {}))) as server:
            d = desk(server.url)
            expect(d.page.locator("#prompt")).to_be_focused()
            d.page.keyboard.type("one")
            d.page.keyboard.press("Shift+Enter")
            d.page.keyboard.type("two")
            expect(d.page.locator("#prompt")).to_have_value("one\ntwo")
            expect(d.page.locator("#send")).to_be_enabled()
            order = []
            for _ in range(2):
                d.page.keyboard.press("Tab")
                order.append(d.page.evaluate("document.activeElement.id"))
            assert order == ["thinking", "send"]
            d.page.keyboard.press("Enter")
            d.done()
            assert server.bodies[0]["messages"][0]["content"] == "one\ntwo"
            d.page.focus("#open-settings")
            d.page.keyboard.press("Enter")
            expect(d.page.get_by_label("Close settings")).to_be_focused()
            d.page.keyboard.press("Escape")
            expect(d.page.locator("#settings")).to_be_hidden()
            expect(d.page.locator("#open-settings")).to_be_focused()
            d.ask("call")
            d.done()
            d.page.keyboard.type("result")
            d.page.keyboard.press("Control+Enter")
            until(lambda: len(server.bodies) == 3)
            assert server.bodies[2]["messages"][-1]["content"] == "result"

    def test_a_phone_scrolls_in_one_direction_only(self, desk: Any):
        wide = (
            "| "
            + " | ".join(["column heading"] * 8)
            + " |\n|"
            + "---|" * 8
            + "\n```\n"
            + "x" * 300
            + "\n```\n"
            + "y" * 300
        )
        asked = calls(("a_tool_with_a_rather_long_name", {"k": "z" * 300}))
        with scripted(text(wide, 40), asked, refusal(400, "w" * 300, "invalid_value")) as server:
            d = desk(server.url, viewport=PHONE, has_touch=True, is_mobile=True)
            d.expected = "400"
            for words in ("q" * 300, "call", "fail"):
                d.ask(words)
                d.done()
                assert fits(d.page)
                assert d.page.locator("#prompt").bounding_box()["y"] < PHONE["height"]
            d.page.click("#open-settings")
            assert fits(d.page)
            box = d.page.locator("#settings").bounding_box()
            assert box["width"] == PHONE["width"]
            d.page.keyboard.press("Escape")
            expect(d.page.locator("#settings")).to_be_hidden()

    def test_touch_targets_are_large_enough(self, desk: Any):
        with scripted(text("Ok.")) as server:
            d = desk(server.url, viewport=PHONE, has_touch=True, is_mobile=True)
            for name in ("#new", "#open-settings", "#thinking", "#send"):
                box = d.page.locator(name).bounding_box()
                assert min(box["width"], box["height"]) >= 24, name  # WCAG 2.2, 2.5.8

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_text_stands_out_in_light_and_dark(self, desk: Any, scheme: str):
        with scripted(thought("Hm.", "Ok **now** `x`.")) as server:
            d = desk(server.url, color_scheme=scheme)
            d.ask("hi")
            d.done()
            canvas = d.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (luminance(canvas) > 0.5) == (scheme == "light")
            for name in (
                ".bubble",
                ".prose",
                ".prose code",
                ".meta",
                ".thought summary",
                ".model",
                ".chip",
                ".small",
            ):
                assert d.page.evaluate(CONTRAST, name) >= 4.5, name

    def test_a_chosen_theme_outranks_the_system_and_is_kept(self, desk: Any):
        with scripted(text("Ok.")) as server:
            d = desk(server.url, color_scheme="light")
            d.setting("Colours").select_option("dark")
            d.page.reload()
            assert (
                luminance(d.page.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.5
            )

    def test_a_long_answer_leaves_the_page_responsive(self, desk: Any):
        """10,000 tokens as fast as they come, in paragraphs, a list and one long code block, while a person types."""
        block = "Some *words* with `code` and a [link](https://example.org).\n\n"
        words = (
            block * 150
            + "- an item of a list\n" * 250
            + "```python\n"
            + "x = [i for i in range(10)]\n" * 500
            + "```\n"
        )
        count = len(pieces(words, 4))
        assert count > 6_000
        with scripted(text(words, 4), text("Short.")) as server:
            d = desk(server.url)
            d.page.evaluate(LONG_TASKS)
            d.ask("hi")
            expect(d.answer.locator(".prose")).not_to_be_empty()
            d.page.keyboard.type("meanwhile", delay=30)
            expect(d.page.locator("#prompt")).to_have_value("meanwhile")
            expect(d.answer).to_have_attribute("aria-busy", "false", timeout=60_000)
            expect(d.answer.locator("li")).to_have_count(250)
            expect(d.answer.locator(".meta")).to_contain_text(f"{count:,} tokens")
            assert (
                d.page.evaluate("window.longest") < 1000
            )  # ms; about 60 on a machine that is not busy
            begun = time.monotonic()
            d.page.press("#prompt", "Enter")
            expect(d.done()).to_contain_text("Short.")
            assert time.monotonic() - begun < 5


def fits(page: Page) -> bool:
    return page.evaluate(
        "document.documentElement.scrollWidth <= innerWidth && document.querySelector('#scroll').scrollWidth "
        "<= document.querySelector('#scroll').clientWidth"
    )


def luminance(color: str) -> float:
    red, green, blue = (int(value) for value in re.findall(r"\d+", color)[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


LONG_TASKS = """() => {
  window.longest = 0;
  new PerformanceObserver((list) => list.getEntries().forEach((e) => { longest = Math.max(longest, e.duration); }))
    .observe({ type: "longtask", buffered: false });
}"""
CONTRAST = """(selector) => {
  const rgb = (color) => { const c = document.createElement("canvas").getContext("2d"); c.fillStyle = color;
    c.fillRect(0, 0, 1, 1); return c.getImageData(0, 0, 1, 1).data; };
  const light = (color) => { const [r, g, b] = [...rgb(color)].slice(0, 3).map((v) => { v /= 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  let node = document.querySelector(selector);
  const ink = light(getComputedStyle(node).color);
  while (rgb(getComputedStyle(node).backgroundColor)[3] < 255) node = node.parentElement;
  const ground = light(getComputedStyle(node).backgroundColor);
  return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
}"""


class TestMarkdown:
    pytestmark = browser_test

    @pytest.fixture
    def drawn(self, desk: Any) -> Iterator[Any]:
        """Draws markdown in one piece and returns its markup."""
        with scripted(text("Ok.")) as server:
            d = desk(server.url)
            yield lambda source: d.page.evaluate(DRAW, [[source]])[0]

    def test_common_forms(self, drawn: Any):
        cases = {
            "a **b** *c* ***d*** __e__ _f_ ~~g~~": "<p>a <strong>b</strong> <em>c</em> <em><strong>d</strong></em> "
            "<strong>e</strong> <em>f</em> <del>g</del></p>",
            "snake_case_name 2 * 3 * 4": "<p>snake_case_name 2 * 3 * 4</p>",
            "**open": "<p>**open</p>",
            "`a*b*` ``c`d``": "<p><code>a*b*</code> <code>c`d</code></p>",
            r"\*a\* \<": "<p>*a* &lt;</p>",
            "# T #\n## C#": "<h3>T</h3><h4>C#</h4>",
            "1. a\n2. b\n   - c\n\nd": "<ol><li>a</li><li>b<ul><li>c</li></ul></li></ol><p>d</p>",
            "3) a": '<ol start="3"><li>a</li></ol>',
            "> a\n> b\n\nc": "<blockquote><p>a\nb</p></blockquote><p>c</p>",
            "---\na  \nb": "<hr><p>a<br>b</p>",
            "in\n1986. A year": "<p>in\n1986. A year</p>",
        }
        assert {source: drawn(source) for source in cases} == cases

    def test_code_keeps_every_character(self, drawn: Any):
        assert "<code>a &lt;b&gt;\n\n  **c**</code>" in drawn("```html\na <b>\n\n  **c**\n```")
        assert "<code>open\n</code>" in drawn("~~~\nopen\n")

    def test_tables_align(self, drawn: Any):
        markup = drawn("a|b\n-|-:\n1|`x\\|y`\n2")
        assert '<td class="left">1</td><td class="right"><code>x|y</code></td>' in markup
        assert markup.endswith("<p>2</p>")

    @pytest.mark.parametrize(
        "attack",
        [
            "<script>window.hit = 1</script>",
            "<img src=x onerror='window.hit = 1'>",
            "[x](javascript:window.hit=1)",
            "[x](JaVaScRiPt:window.hit=1)",
            "[x](java\tscript:window.hit=1)",
            "[x](data:text/html,<script>1</script>)",
            "![x](javascript:window.hit=1)",
            "[x](<javascript:window.hit=1>)",
            '[x](https://a.b/"onmouseover="window.hit=1)',
            "<javascript:window.hit=1>",
            "```<img src=x onerror=window.hit=1>\n<img src=x onerror=window.hit=1>\n```",
            "| <img src=x onerror=window.hit=1> |\n|---|\n",
            "<svg/onload=window.hit=1> <iframe srcdoc='<script>1</script>'> <a href='javascript:1'>x</a>",
            "&#106;avascript:1 [x](&#106;avascript:1) [x](//evil.example)",
        ],
    )
    def test_nothing_a_model_writes_becomes_active(self, desk: Any, attack: str):
        with scripted(text(attack, 1)) as server:
            d = desk(server.url)
            d.ask(attack)
            d.done()
            bad = "script, img, iframe, svg:not(.icon), object, embed, form, style, [onerror], [onload], [onmouseover]"
            assert d.page.locator(f".answer .prose :is({bad}), .bubble *").count() == 0
            links = d.page.evaluate(
                "[...document.querySelectorAll('.answer a')].map((a) => a.protocol)"
            )
            assert set(links) <= {"https:", "http:", "mailto:"}
            assert d.page.evaluate("window.hit") is None

    def test_the_pieces_a_text_comes_in_do_not_matter(self, desk: Any):
        """Every two-way split, one character at a time, and random pieces, against the whole."""
        with scripted(text("Ok.")) as server:
            d = desk(server.url)
            assert d.page.evaluate(SPLITS, SAMPLES) == []

    def test_time_grows_with_the_length_only(self, desk: Any):
        hostile = [
            "*a ",
            "[",
            "](",
            "`",
            "``a`",
            "**",
            "_a",
            "> ",
            "- ",
            "1. ",
            "\n",
            "|-",
            "# ",
            "  ",
            "~~~",
            "![a](",
            "<http:",
            "\\",
            "http://.",
            "((",
        ]
        with scripted(text("Ok.")) as server:
            d = desk(server.url)
            times = {
                piece: d.page.evaluate(TIMED, piece * (20_000 // len(piece))) for piece in hostile
            }
            times["long line"] = d.page.evaluate(TIMED, "# " + " " * 20_000 + "x")
            times["blank lines"] = d.page.evaluate(TIMED, "- a" + "\n" * 20_000 + "  b")
            assert {piece: ms for piece, ms in times.items() if ms > 1500} == {}


class TestPolicy:
    pytestmark = browser_test

    def test_the_page_can_speak_to_its_own_server_only(self, desk: Any):
        with scripted(text("Ok.")) as server, scripted(text("Other.")) as other:
            d = desk(server.url)
            d.expected = "Content Security Policy|Refused|violates|127.0.0.1"
            reached = d.page.evaluate(
                "(url) => fetch(url).then(() => true, () => false)", other.url
            )
            assert reached is False and other.authorizations == []

    def test_the_key_goes_to_the_server_and_stays_in_the_tab(self, desk: Any):
        with scripted(text("Ok.")) as server:
            server.key = "secret"
            d = desk(server.url)
            d.expected = "401"
            d.page.fill("[type=password]", "secret")
            d.page.press("[type=password]", "Tab")
            until(lambda: "Bearer secret" in server.authorizations)
            assert "secret" not in str(d.page.evaluate("JSON.stringify(localStorage)"))


DRAW = """async (texts) => {
  const { MarkdownStream } = await import("/page/markdown.js");
  return texts.map((parts) => {
    const root = document.createElement("div");
    const stream = new MarkdownStream(root);
    for (const part of parts) stream.append(part);
    return root.innerHTML;
  });
}"""
SPLITS = """async (samples) => {
  const { MarkdownStream } = await import("/page/markdown.js");
  const draw = (parts) => {
    const root = document.createElement("div");
    const stream = new MarkdownStream(root);
    for (const part of parts) stream.append(part);
    return root.innerHTML;
  };
  let seed = 7;
  const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
  const wrong = [];
  for (const text of samples) {
    const whole = draw([text]);
    const ways = [[...text]];
    for (let i = 1; i < text.length; i++) ways.push([text.slice(0, i), text.slice(i)]);
    for (let k = 0; k < 20; k++) {
      const parts = [];
      for (let at = 0; at < text.length;) { const n = 1 + random(9); parts.push(text.slice(at, at + n)); at += n; }
      ways.push(parts);
    }
    for (const parts of ways) if (draw(parts) !== whole) { wrong.push([text, parts]); break; }
  }
  return wrong;
}"""
TIMED = """async (text) => {
  const { MarkdownStream } = await import("/page/markdown.js");
  const begun = performance.now();
  new MarkdownStream(document.createElement("div")).append(text);
  return performance.now() - begun;
}"""
SAMPLES = [
    "Text **bold** and\nmore\n\n- a\n- b\n  - c\n\n  d\n\nend",
    "a | b\n---|---\n1 | 2\n\nx",
    "para\na | b\n---|---\n1 | 2\ny",
    "```py\nx = `1`\n``\n```\nafter\n~~~\nopen ~~\nline",
    "  ```\n  indented\n   x\n  ```\nz",
    "> q\nlazy\n\n> r\n# H\n***\n* * *\n*em*",
    "1. a\n\n   ```\n   code\n   ```\n2. b\n\n\n\npara",
    '[a](https://x.y/(z) "t") <https://e.f> http://g.h. ![i](https://j.k/l.png)',
    "- a\n\n- b\n\n\nc\n- d\n+ e\n1) f\n2) g",
    "\n\n  \nx  \ny\\\nz &amp; <b>",
]
