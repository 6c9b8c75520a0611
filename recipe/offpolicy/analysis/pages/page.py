"""One self-contained HTML file without network access, light or dark according to the reader's system."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .panels import Panel, render_panels
from .plotting import PageError
from .table import Table, format_cell, to_html
from .template import LOADER, PANEL, STYLE, render_template

if TYPE_CHECKING:
    from markupsafe import Markup

LARGEST = 5_000_000
"""Largest size of a page in bytes, so that it can be sent to a colleague."""


@dataclass(frozen=True)
class Code:
    """Preformatted text; white space is kept."""

    text: str


@dataclass(frozen=True)
class Details:
    """Blocks that are folded until the reader opens them."""

    summary: str
    blocks: Sequence[Block]


Block: TypeAlias = "str | Table | Mapping[str, Any] | Sequence[Panel] | Code | Details"
"""A paragraph, a table, names with their values, panels, preformatted text, or folded blocks."""


@dataclass
class Page:
    """A title and sections, in the order in which they are added.

    Attributes:
        title: title and heading of the page.
        subtitle: line below the heading.
        refresh: seconds after which a browser reloads the page; 0 for never.
    """

    title: str
    subtitle: str = ""
    refresh: int = 0
    _sections: list[dict[str, Any]] = field(default_factory=list)

    def add_section(self, heading: str, *blocks: Block) -> None:
        """Add a section with the non-empty blocks, if there are any."""
        if found := [render_block(block) for block in blocks if block]:
            self._sections.append({"heading": heading, "blocks": found})

    def render(self) -> str:
        """Render the whole page, with the scripts of its panels if it has any."""
        from markupsafe import Markup

        drawn = any(PANEL in block for section in self._sections for block in section["blocks"])
        scripts = [*_read_scripts(), LOADER] if drawn else []
        # Whatever a recorded text contains, a script runs only if the policy lists its digest.
        digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
        return render_template(
            "page",
            title=self.title,
            subtitle=self.subtitle,
            refresh=self.refresh,
            style=Markup(STYLE),
            sections=self._sections,
            scripts=list(map(Markup, scripts)),
            policy=Markup(" ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"),
        )

    def write(self, path: Path) -> int:
        """Write the page atomically; characters that UTF-8 cannot encode become "?".

        Returns:
            Its size in bytes.

        Raises:
            PageError: the page would be larger than ``LARGEST``.
            OSError: the file cannot be written.
        """
        content = self.render().encode("utf-8", errors="replace")
        if len(content) > LARGEST:
            raise PageError(
                f"{path}: the page would be {len(content):,} bytes long, more than the limit of {LARGEST:,}. Give it "
                "fewer figures or shorter tables."
            )
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
    """Render a block; all text is escaped."""
    if isinstance(block, str):
        return render_template("paragraph", text=block)
    if isinstance(block, Code):
        return render_template("code", text=block.text)
    if isinstance(block, Table):
        return to_html(block)
    if isinstance(block, Details):
        return render_template("details", summary=block.summary, blocks=[render_block(each) for each in block.blocks])
    if isinstance(block, Mapping):
        return render_template("keys", pairs=[(name, format_cell(value)) for name, value in block.items()])
    return render_panels(block)


@cache
def _read_scripts() -> list[str]:
    from bokeh.resources import Resources

    # A closing tag in a string would end the script element.
    return [
        script.replace("</script", "<\\/script") for script in Resources(mode="inline", components=["bokeh"]).js_raw
    ]
