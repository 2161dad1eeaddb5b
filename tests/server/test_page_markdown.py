"""Markdown in the page: its forms, what it never makes of a text, streams, and the time it takes."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.scripted import scripted, text
from tests.server.desk import browser_test


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
