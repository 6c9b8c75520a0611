"""Tables, figures and self-contained HTML pages: what the command lines of this package show their results with.

Knows nothing of corrections. Rich, matplotlib and Jinja2 are imported where they are used.
"""

from .page import Page, code, details, figure, keys, panels, paragraph, table
from .table import Column, Table, fitted, to_csv, to_html, to_rich
from .target import PageError, check_target

__all__ = [
    "Column",
    "Page",
    "PageError",
    "Table",
    "check_target",
    "code",
    "details",
    "figure",
    "fitted",
    "keys",
    "panels",
    "paragraph",
    "table",
    "to_csv",
    "to_html",
    "to_rich",
]
