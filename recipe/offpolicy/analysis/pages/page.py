"""One self-contained HTML file: no script, nothing from the network, light or dark as the reader's system is."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .table import Table, shown, to_html
from .target import PageError
from .template import STYLE, rendered

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

    from .figures import Panel

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

    def section(self, heading: str, *blocks: Markup) -> None:
        """Add a section.

        Args:
            blocks: from the functions below.

        Raises:
            TypeError: a block that is none of theirs.
        """
        for block in blocks:
            _check(block)
        self._sections.append({"heading": heading, "blocks": blocks})

    def html(self) -> str:
        """The whole page."""
        from markupsafe import Markup

        return rendered("page", title=self.title, subtitle=self.subtitle, style=Markup(STYLE), sections=self._sections)

    def write(self, path: Path) -> int:
        """Write it; a reader never sees half of it. What UTF-8 cannot say is written as "?".

        Returns:
            Its size in bytes.

        Raises:
            PageError: it would be larger than ``LARGEST``.
            OSError: the file cannot be written.
        """
        content = self.html().encode("utf-8", errors="replace")
        if len(content) > LARGEST:
            raise PageError(
                f"{path}: the page would have {len(content):,} bytes, more than {LARGEST:,}. Give it fewer figures "
                f"or shorter tables."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return len(content)


def paragraph(text: str) -> Markup:
    return rendered("paragraph", text=text)


def code(text: str) -> Markup:
    """Text as it stands: white space is kept."""
    return rendered("code", text=text)


def table(content: Table) -> Markup:
    return to_html(content)


def keys(values: Mapping[str, Any]) -> Markup:
    """Names and their values, as ``table.shown`` writes them."""
    return rendered("keys", pairs=[(name, shown(value)) for name, value in values.items()])


def details(summary: str, *blocks: Markup) -> Markup:
    """Blocks that stay folded until the reader opens them."""
    for block in blocks:
        _check(block)
    return rendered("details", summary=summary, blocks=blocks)


def figure(drawing: Figure, alt: str) -> Markup:
    """A figure within the page, as SVG or PNG, whichever is smaller.

    Args:
        alt: what it shows, for who cannot see it.
    """
    return rendered("figure", images=[_image(drawing, alt)])


def panels(drawn: Sequence[Panel]) -> Markup:
    """Panels as pictures of their own, so that they stack on a narrow screen."""
    from .figures import picture

    return rendered("figure", images=[_image(picture([one]), one.alt) for one in drawn])


def _image(drawing: Figure, alt: str) -> dict[str, str]:
    from .figures import image

    kind, content = image(drawing)
    return {"kind": kind, "data": base64.b64encode(content).decode(), "alt": alt}


def _check(block: Any) -> None:
    from markupsafe import Markup

    if not isinstance(block, Markup):
        raise TypeError(f"{str(block)[:60]!r} is no block of a page: use paragraph, code, table or figure.")
