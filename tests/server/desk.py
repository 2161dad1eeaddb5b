"""A real browser at a page: what the tests of the web page share.

`desk(url)` opens a page; when the test ends, no page may have logged an error or asked another origin for anything.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
browser_test = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="no chromium; on Debian: apt-get install --no-install-recommends chromium",
    ),
]
DESK = {"width": 1180, "height": 820}
PHONE = {"width": 390, "height": 844}


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
    # Checked before they are closed: what a page asks once its server has gone is no fault of its own.
    for each in opened:
        each.check()
        each.page.context.close()
