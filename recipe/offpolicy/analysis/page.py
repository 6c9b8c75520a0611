"""The result of a tool as sections of blocks, rendered as an HTML page, on the console, or as one figure.

A page is one self-contained file without network access, light or dark according to the reader's system. Every value
is escaped. Jinja2, Bokeh and Rich are imported where they are used.
"""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .plotting import Panel, draw_panels, serialize
from .table import Table, fit_to_width, format_cell, format_rows

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from matplotlib.figure import Figure

PANEL = 'type="application/json" class="panel"'
"""Attributes of the script element with a panel's data."""
PIPE_WIDTH = 100
"""Width in characters of a table that is written to a file or a pipe."""
_LOADER = """
for (const data of document.querySelectorAll("script.panel"))
  Bokeh.embed.embed_item(JSON.parse(data.textContent), data.previousElementSibling);
"""

# Whatever a recorded text contains, `default-src 'none'` prevents network access by the page.
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; script-src {{ policy }}">
{% if refresh %}<meta http-equiv="refresh" content="{{ refresh }}">
{% endif %}<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<header><h1>{{ title }}</h1>{% if subtitle %}<p class="subtitle">{{ subtitle }}</p>{% endif %}</header>
{% if sections | length > 2 %}<nav aria-label="Sections"><ul>
{% for section in sections %}<li><a href="#s{{ loop.index }}">{{ section.heading }}</a></li>
{% endfor %}</ul></nav>{% endif %}
<main>
{% for section in sections %}<section id="s{{ loop.index }}">
<h2>{{ section.heading }}</h2>
{% for block in section.blocks %}{{ block }}
{% endfor %}</section>
{% endfor %}</main>
{% for script in scripts %}<script>{{ script }}</script>
{% endfor %}</body>
</html>
"""

_TABLE = """\
<div class="scroll">
<table{% if "right" not in aligned %} class="prose"{% endif %}>
{% if title %}<caption>{{ title }}</caption>{% endif %}
<thead><tr>{% for heading in headings %}<th scope="col" class="{{ aligned[loop.index0] }}">{{ heading }}</th>\
{% endfor %}</tr></thead>
<tbody>{% for row in rows %}<tr>{% for text in row %}<td class="{{ aligned[loop.index0] }}">{{ text }}</td>\
{% endfor %}</tr>
{% endfor %}</tbody></table></div>"""

_TEMPLATES = {
    "page": _PAGE,
    "table": _TABLE,
    "paragraph": "<p>{{ text }}</p>",
    "code": "<pre><code>{{ text }}</code></pre>",
    "panels": (
        '<figure>{% for panel in panels %}<div role="img" aria-label="{{ panel.alt }}"></div>'
        '<script type="application/json" class="panel">{{ panel.content }}</script>'
        "{% endfor %}</figure>"
    ),
    "keys": "<dl>{% for key, value in pairs %}<dt>{{ key }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>",
    "details": (
        "<details><summary>{{ summary }}</summary>{% for block in blocks %}{{ block }}\n{% endfor %}</details>"
    ),
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #5f6c7b; --line: #dfe3e8; --back: #ffffff;
  --shade: #f5f7fa; --link: #1d4ed8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaef; --muted: #9aa5b1; --line: #38424d; --back: #14181d; --shade: #1d232a; --link: #8ab4f8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1.25rem 4rem; background: var(--back); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line); }
p { max-width: 60rem; margin: .5rem 0; }
.subtitle { color: var(--muted); }
a { color: var(--link); text-decoration: none; }
nav ul { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; list-style: none; padding: 0; margin: .8rem 0 0; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92em; }
caption { text-align: left; font-weight: 600; padding: .2rem 0 .4rem; }
th, td { padding: .28rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--muted); font-weight: 600; vertical-align: bottom; border-bottom-width: 2px; }
td.right, th.right { text-align: right; }
td.right { white-space: nowrap; }
td.left, th.left { text-align: left; overflow-wrap: break-word; min-width: 2.5rem; max-width: 40rem; }
table:not(.prose) td:first-child { white-space: nowrap; }
pre { background: var(--shade); border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem;
  overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .87em; line-height: 1.45; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: .8rem 0; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
figure { display: flex; flex-wrap: wrap; justify-content: center; align-items: flex-start; gap: .5rem; margin: 1rem 0;
  background: #ffffff; border: 1px solid var(--line); border-radius: 8px; padding: .5rem; }
figure div[role] { flex: 1 1 26rem; min-width: 0; max-width: min(100%, 36rem); }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--link); }
@media (max-width: 40rem) { .prose thead { display: none; } .prose tr, .prose td { display: block; } }
@media print {
  :root { color-scheme: light; --ink: #1f2933; --muted: #5f6c7b; --line: #dfe3e8; --back: #ffffff; --shade: #f5f7fa; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  .scroll, pre { overflow: visible; }
  table { font-size: 7.5pt; }
  .scroll, tr, figure div { break-inside: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; } }
"""


@dataclass(frozen=True)
class Code:
    """Preformatted text; white space is kept, and lines are not broken."""

    text: str


@dataclass(frozen=True)
class Details:
    """Blocks that a page folds until the reader opens them; on the console, only their tables are printed."""

    summary: str
    blocks: Sequence[Block]


Block: TypeAlias = "str | Table | Mapping[str, Any] | Sequence[Panel] | Code | Details"
"""A paragraph, a table, names with their values, panels, preformatted text, or folded blocks. Names with values, and
panels, are not printed on the console. Empty blocks are skipped."""
Sections: TypeAlias = Mapping[str, Iterable[Block]]
"""Heading -> blocks."""


def draw_figure(sections: Sections, title: str = "") -> Figure:
    """Draw all panels into one figure, at most two side by side."""
    blocks = [block for found in sections.values() for block in found]
    panels = [panel for block in blocks if isinstance(block, list) for panel in block]
    return draw_panels(panels, columns=min(len(panels), 2), title=title)


def print_sections(sections: Sections) -> None:
    """Print tables, split between columns if they are wider than the console, and text."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    # Without the capture, Rich would end the program if a reader closed the pipe.
    with console.capture() as captured:
        for block in (block for found in sections.values() for block in found if block):
            if isinstance(block, str):  # a terminal breaks it between words
                console.print(Text(block), soft_wrap=not console.is_terminal)
            elif isinstance(block, Code):
                console.print(Text(block.text), soft_wrap=True)
            for table in block.blocks if isinstance(block, Details) else [block]:
                if isinstance(table, Table):
                    console.print(*fit_to_width(table, console.width), sep="\n")
    sys.stdout.write(captured.get())


def render_page(title: str, sections: Sections, subtitle: str = "", refresh: int = 0) -> str:
    """Render a page, with the scripts of its panels if it has any; sections without blocks are omitted.

    Args:
        title: title and heading of the page.
        subtitle: line below the heading.
        refresh: seconds after which a browser reloads the page; 0 for never.
    """
    from markupsafe import Markup

    blocks = {heading: [render_block(block) for block in found if block] for heading, found in sections.items()}
    drawn = any(PANEL in block for found in blocks.values() for block in found)
    scripts = [*_read_scripts(), _LOADER] if drawn else []
    # Whatever a recorded text contains, a script runs only if the policy lists its digest.
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return _render(
        "page",
        title=title,
        subtitle=subtitle,
        refresh=refresh,
        style=Markup(_STYLE),
        sections=[{"heading": heading, "blocks": found} for heading, found in blocks.items() if found],
        scripts=list(map(Markup, scripts)),
        policy=Markup(" ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"),
    )


def write_page(path: Path, title: str, sections: Sections, subtitle: str = "", refresh: int = 0) -> int:
    """Write a page atomically, see ``render_page``; characters that UTF-8 cannot encode become "?".

    Returns:
        Its size in bytes.

    Raises:
        OSError: the file cannot be written.
    """
    content = render_page(title, sections, subtitle, refresh).encode("utf-8", errors="replace")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file is written next to the target, so that the replacement is atomic.
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return len(content)


def render_block(block: Block) -> Markup:
    """Render a block; panels are rendered separately, so that they stack on a narrow screen."""
    from markupsafe import Markup

    if isinstance(block, str):
        return _render("paragraph", text=block)
    if isinstance(block, Code):
        return _render("code", text=block.text)
    if isinstance(block, Table):
        aligned = [block.get_alignment(index) for index in range(len(block.columns))]
        headings = [column.heading for column in block.columns]
        return _render("table", title=block.title, headings=headings, aligned=aligned, rows=format_rows(block))
    if isinstance(block, Details):
        return _render("details", summary=block.summary, blocks=[render_block(each) for each in block.blocks])
    if isinstance(block, Mapping):
        return _render("keys", pairs=[(name, format_cell(value)) for name, value in block.items()])
    # A closing tag in a string would end the script that contains it.
    items = [{"alt": panel.alt, "content": Markup(serialize(panel).replace("<", "\\u003c"))} for panel in block]
    return _render("panels", panels=items)


@cache
def _read_scripts() -> list[str]:
    from bokeh.resources import Resources

    # A closing tag in a string would end the script element.
    return [
        script.replace("</script", "<\\/script") for script in Resources(mode="inline", components=["bokeh"]).js_raw
    ]


@cache
def _environment() -> Environment:
    from jinja2 import DictLoader, Environment, StrictUndefined

    return Environment(loader=DictLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)


def _render(name: str, **values: Any) -> Markup:
    """Render one of the templates; values are escaped unless they are ``Markup``."""
    from markupsafe import Markup

    return Markup(_environment().get_template(name).render(**values))
