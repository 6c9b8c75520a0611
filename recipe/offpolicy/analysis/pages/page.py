"""One self-contained HTML file without network access, light or dark as the reader's system is."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output_file import PageError
from .table import Table, format_cell, to_html
from .template import LOADER, PANEL, STYLE, render_template

if TYPE_CHECKING:
    from markupsafe import Markup

LARGEST = 5_000_000
"""Bytes that a page may have, so that it can be sent to a colleague."""


@dataclass
class Page:
    """A title and sections, in the order in which they are added.

    Attributes:
        title: of the page, also its heading.
        subtitle: a line below it.
    """

    title: str
    subtitle: str = ""
    _sections: list[dict[str, Any]] = field(default_factory=list)

    def add_section(self, heading: str, *blocks: Markup) -> None:
        """Add a section.

        Args:
            blocks: from the functions below.

        Raises:
            TypeError: a block that is none of theirs.
        """
        for block in blocks:
            _check(block)
        self._sections.append({"heading": heading, "blocks": blocks})

    def render(self) -> str:
        """Render the whole page, with the scripts of its panels where it has some."""
        from markupsafe import Markup

        drawn = any(PANEL in block for section in self._sections for block in section["blocks"])
        scripts = [*_read_scripts(), LOADER] if drawn else []
        # Scripts that the policy does not name by their digest do not run, whatever a recorded text contains.
        digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
        return render_template(
            "page",
            title=self.title,
            subtitle=self.subtitle,
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
            PageError: it would be larger than ``LARGEST``.
            OSError: the file cannot be written.
        """
        content = self.render().encode("utf-8", errors="replace")
        if len(content) > LARGEST:
            raise PageError(
                f"{path}: the page would have {len(content):,} bytes, more than {LARGEST:,}. Give it fewer figures "
                f"or shorter tables."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside the target, so that the replacement is atomic.
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return len(content)


def render_paragraph(text: str) -> Markup:
    """Render one paragraph of escaped text."""
    return render_template("paragraph", text=text)


def render_code(text: str) -> Markup:
    """Render preformatted text; white space is kept."""
    return render_template("code", text=text)


def render_table(content: Table) -> Markup:
    """Render a table; every cell is escaped."""
    return to_html(content)


def render_keys(values: Mapping[str, Any]) -> Markup:
    """Render names and their values, formatted as table cells."""
    return render_template("keys", pairs=[(name, format_cell(value)) for name, value in values.items()])


def render_details(summary: str, *blocks: Markup) -> Markup:
    """Render blocks that are folded until the reader opens them."""
    for block in blocks:
        _check(block)
    return render_template("details", summary=summary, blocks=blocks)


@cache
def _read_scripts() -> list[str]:
    from bokeh.resources import Resources

    # A closing tag in a string would end the script.
    return [
        script.replace("</script", "<\\/script") for script in Resources(mode="inline", components=["bokeh"]).js_raw
    ]


def _check(block: Any) -> None:
    from markupsafe import Markup

    if not isinstance(block, Markup):
        raise TypeError(f"{str(block)[:60]!r} is not a block of a page. Fix: pass what a render_ function returns.")
