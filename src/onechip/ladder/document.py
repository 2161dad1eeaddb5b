"""A report as a list of blocks, written as Markdown or as one HTML page that needs nothing from outside.

Owns the two ways of writing. What a report says is `report`.
"""

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onechip.ladder.tables import Row, markdown


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Bullets:
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """The first row is the header."""

    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Picture:
    """`name` without ending; both NAME.png and NAME.svg exist."""

    name: str
    caption: str


Block = Heading | Text | Bullets | Table | Picture

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c1c1c; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 8rem; }
th { background: #f5f5f5; }
img { max-width: 100%; }
figure { margin: 1.5rem 0; } figcaption { color: #555; font-size: .9rem; }
@media (prefers-color-scheme: dark) {
  body { background: #161616; color: #e6e6e6; } th { background: #262626; } th, td { border-color: #333; }
  img { background: #fff; } figcaption { color: #aaa; }
}
"""


def as_markdown(blocks: Sequence[Block]) -> str:
    """One string; pictures are linked by their file names."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return "#" * level + " " + text
        case Text(text):
            return text
        case Bullets(lines):
            return "\n".join(f"- {line}" for line in lines)
        case Table(rows):
            return markdown(rows)
        case Picture(name, caption):
            return f"![{caption}]({name}.png)"


def as_html(title: str, blocks: Sequence[Block], pictures: Mapping[str, bytes]) -> str:
    """One page; `pictures` are SVG by name and go into it. Its policy forbids every request and every script."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    body = "\n".join(_html(block, pictures) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block, pictures: Mapping[str, bytes]) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{html.escape(text)}</p>"
        case Bullets(lines):
            return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"
        case Table(rows):
            return f'<div class="wide">{_html_table(rows)}</div>'
        case Picture(name, caption):
            data = base64.b64encode(pictures[name]).decode()
            said = html.escape(caption)
            return (
                f'<figure><img alt="{said}" src="data:image/svg+xml;base64,{data}">'
                f"<figcaption>{said}</figcaption></figure>"
            )


def _html_table(rows: Sequence[Row]) -> str:
    head, *body = [[html.escape(text) for text in row] for row in rows]
    top = "".join(f"<th>{text}</th>" for text in head)
    lines = "".join("<tr>" + "".join(f"<td>{t}</td>" for t in row) + "</tr>" for row in body)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"
