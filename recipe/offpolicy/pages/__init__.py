"""Tables, figures and self-contained HTML pages: what the command lines of this package show their results with.

Knows nothing of corrections. Rich, matplotlib and Jinja2 are imported where they are used.
"""

from .page import Page, PageError, code, details, figure, keys, paragraph, table
from .table import Column, Table, to_csv, to_html, to_rich

__all__ = [
    "Column",
    "Page",
    "PageError",
    "Table",
    "code",
    "details",
    "figure",
    "keys",
    "paragraph",
    "table",
    "to_csv",
    "to_html",
    "to_rich",
]
