"""Templates and style sheet of a page; autoescape is on for every value."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

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
<div class="scroll{% if headings | length > 16 %} wide{% endif %}">
<table{% if "right" not in aligned %} class="prose"{% endif %}>
{% if title %}<caption>{{ title }}</caption>{% endif %}
<thead><tr>{% for heading in headings %}<th scope="col" class="{{ aligned[loop.index0] }}">{{ heading }}</th>\
{% endfor %}</tr></thead>
<tbody>{% for row in rows %}<tr>{% for text in row %}<td class="{{ aligned[loop.index0] }}">{{ text }}</td>\
{% endfor %}</tr>
{% endfor %}</tbody></table></div>"""

PANEL = 'type="application/json" class="panel"'
"""Attributes of the script element with a panel's data."""
LOADER = """
for (const data of document.querySelectorAll("script.panel"))
  Bokeh.embed.embed_item(JSON.parse(data.textContent), data.previousElementSibling);
"""
"""Script that draws all panels of a page."""

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

STYLE = """
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
a:hover { text-decoration: underline; }
nav ul { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; list-style: none; padding: 0; margin: .8rem 0 0; }
.scroll { overflow-x: auto; margin: .8rem 0; background: linear-gradient(90deg, var(--back) 30%, transparent) 0 0,
  linear-gradient(270deg, var(--back) 30%, transparent) 100% 0, linear-gradient(90deg, var(--muted), transparent) 0 0,
  linear-gradient(270deg, var(--muted), transparent) 100% 0; background-repeat: no-repeat;
  background-size: 2.5rem 100%, 2.5rem 100%, .6rem 100%, .6rem 100%;
  background-attachment: local, local, scroll, scroll; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92em; }
caption { text-align: left; font-weight: 600; padding: .2rem 0 .4rem; }
th, td { padding: .28rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--muted); font-weight: 600; vertical-align: bottom; border-bottom-width: 2px; }
td.right, th.right { text-align: right; }
td.right { white-space: nowrap; }
td.left, th.left { text-align: left; overflow-wrap: break-word; min-width: 2.5rem; max-width: 40rem; }
table:not(.prose) td:first-child { white-space: nowrap; }
tbody tr:hover { background: var(--shade); }
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
@media (max-width: 48rem) {
  .scroll td.left { min-width: 5.5rem; }
  .scroll td.left:last-child { min-width: 14rem; } }
@media (max-width: 40rem) {
  dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; }
  .prose thead { display: none; }
  .prose, .prose tbody, .prose tr, .prose td { display: block; }
  .prose tr { padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .scroll .prose td { padding: .1rem 0; border: 0; overflow-wrap: anywhere; min-width: 0; }
  .prose td:first-child { font-weight: 600; } }
@media print {
  @page { margin: 12mm; }
  :root { color-scheme: light; --ink: #1f2933; --muted: #5f6c7b; --line: #dfe3e8; --back: #ffffff; --shade: #f5f7fa; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  .scroll { overflow: visible; background: none; }
  table { font-size: 7.5pt; }
  th, td { padding: .15rem .25rem; }
  td.left, th.left { min-width: 0; }
  .wide table { font-size: 4.5pt; }
  .wide th, .wide td { padding: .1rem; }
  pre { overflow: visible; }
  .scroll, tr, figure div { break-inside: avoid; }
  h2, caption { break-after: avoid; }
  figure div[role] { flex: 0 1 48%; }
  details > * { display: block; }
  details > dl { display: grid; }
  details::details-content { content-visibility: visible; block-size: auto; } }
"""


@cache
def _environment() -> Environment:
    from jinja2 import DictLoader, Environment, StrictUndefined

    return Environment(loader=DictLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)


def render_template(name: str, **values: Any) -> Markup:
    """Render one of the templates; values are escaped unless they are ``Markup``."""
    from markupsafe import Markup

    return Markup(_environment().get_template(name).render(**values))
