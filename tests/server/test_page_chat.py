"""The web page over scripted answers: thoughts, calls, failures, keys, sizes, colours, and long answers."""

import re
import time
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.scripted import Answer, calls, pieces, refusal, scripted, text, thought
from tests.server.desk import PHONE, browser_test
from tests.server.harness import until


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

    def test_the_frame_never_moves(self, desk: Any):
        with scripted(text("Ok.")) as server:
            d = desk(server.url)
            d.setting("Format").select_option("schema")
            d.page.get_by_text("Insert an example").last.click()
            d.page.click("#format-chip")
            d.ask("hi")
            d.done()
            assert (
                d.page.evaluate("document.querySelector('header.bar').getBoundingClientRect().top")
                == 0
            )

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
