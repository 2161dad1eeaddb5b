"""Takes the screenshots of the web page under docs/: `python -m tests.screenshots [DIRECTORY]`, or `make screenshots`.

The real page over scripted answers, in Chromium, at the sizes and in the states the documentation shows.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.scripted import Answer, calls, pieces, refusal, scripted, text
from tests.server.desk import CHROMIUM, DESK, PHONE

from onechip.request import EngineStats

ROOT = Path(__file__).parents[1]
LIMIT = 200_000  # bytes of a screenshot

PAGED = """A **paged K/V cache** keeps the keys and values of a sequence in small pages that lie \
anywhere in memory; a table says where each one is.

1. Memory is cut into pages of, say, 16 tokens.
2. A sequence takes a page when it needs one, and gives all of them back when it ends.
3. Layers with a sliding window give pages back *while it runs*.

| layers | keep | bytes a token |
|---|---|---:|
| full attention | the whole context | 6,144 |
| sliding window | the last 512 tokens | 0 |

```python
def allocate(free: list[int], count: int) -> list[int]:
    if len(free) < count:
        raise OutOfPages(count)
    return [free.pop() for _ in range(count)]
```

So nothing is reserved for tokens that never come."""
PLAN = """The user asks about the weather in two cities.

- I have `get_weather`, which takes one city.
- So two calls, then compare."""
HAIKU = "Silicon at rest,\\\na thought runs through the lattice:\\\nheat, then one more word."

WHY = """It keeps to five, seven and five syllables, and turns once: what rests in the first line is at work in the \
second and spent in the third. """


def chat(page: Page, answers: list[Answer]) -> None:
    answers[:] = [text(PAGED, pause=0.002)]
    ask(page, "Explain how a paged K/V cache works")


def thinking_and_tools(page: Page, answers: list[Answer]) -> None:
    thoughts = [{"reasoning_content": piece} for piece in pieces(PLAN, 4)]
    two = calls(
        ("get_weather", {"city": "Lisbon"}), ("get_weather", {"city": "Oslo"}), before=thoughts
    )
    answers[:] = [Answer(two.deltas, two.finish, pause=0.02)]
    page.click("#thinking")
    page.click("#open-settings")
    page.locator("section", has_text="Functions the model").get_by_text("Insert an example").click()
    ask(page, "Is it warmer in Lisbon or in Oslo today?")
    page.click(".thought summary")
    page.get_by_label("Result of get_weather").first.fill('{"temperature": 24, "unit": "celsius"}')
    page.get_by_label("Result of get_weather").last.focus()
    page.locator("#tools-chip").click()


def error(page: Page, answers: list[Answer]) -> None:
    message = "response_format.json_schema: 'uniqueItems' cannot be enforced; leave it out"
    answers[:] = [
        text("Ready when you are.", pause=0.01),
        refusal(400, message, "invalid_value", "response_format"),
    ]
    ask(page, "Are you there?")
    page.click("#open-settings")
    page.get_by_label("Format", exact=True).select_option("schema")
    page.get_by_text("Insert an example").last.click()
    page.press("#prompt", "Escape")
    ask(page, "List three books on compilers")


def phone(page: Page, answers: list[Answer]) -> None:
    answers[:] = [
        text(HAIKU, pause=0.02),
        text(WHY * 2, pause=0.02),
    ]
    ask(page, "Write a haiku about a chip that thinks")
    page.fill("#prompt", "And why does it work?")
    page.press("#prompt", "Enter")
    expect(page.locator(".answer").last.locator(".meta")).to_contain_text("tokens/s")


SHOTS: dict[str, tuple[Callable[[Page, list[Answer]], None], dict[str, Any]]] = {
    "page-chat": (chat, {"viewport": DESK}),
    "page-thinking-tools": (thinking_and_tools, {"viewport": DESK}),
    "page-error": (error, {"viewport": DESK}),
    "page-phone-dark": (
        phone,
        {
            "viewport": PHONE,
            "color_scheme": "dark",
            "has_touch": True,
            "is_mobile": True,
            "device_scale_factor": 2,
        },
    ),
}


def ask(page: Page, words: str) -> None:
    page.fill("#prompt", words)
    expect(page.locator("#send")).to_be_enabled()
    page.press("#prompt", "Enter")
    expect(page.locator(".answer").last).to_have_attribute("aria-busy", "false", timeout=20_000)


def take(browser: Browser, directory: Path) -> None:
    """Write every screenshot; fails where a state cannot be reached or a file is too large."""
    with scripted(text("")) as server:
        server.stats = EngineStats(running=3, waiting=1, kv_usage=0.37)
        for name, (state, options) in SHOTS.items():
            context = browser.new_context(**options)
            page = context.new_page()
            page.goto(server.url)
            expect(page.locator("#state")).to_have_attribute("data-state", "ready")
            state(page, server.answers)
            page.wait_for_timeout(400)  # scrolling and fades come to rest
            path = directory / f"{name}.png"
            page.screenshot(path=path)
            assert path.stat().st_size < LIMIT, path
            context.close()


def main(directory: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        take(browser, directory)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
