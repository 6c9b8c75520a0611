"""Tables, figures and self-contained HTML pages of the command-line tools.

Independent of corrections. Rich, matplotlib and Jinja2 are imported where they are used.
"""

from .output_file import PageError, check_target
from .page import (
    Page,
    render_code,
    render_details,
    render_keys,
    render_paragraph,
    render_table,
)
from .panels import render_panels
from .table import Column, Table, fit_to_width, to_csv, to_html, to_rich
from .terminal import open_console, print_table

__all__ = [
    "Column",
    "Page",
    "PageError",
    "Table",
    "check_target",
    "fit_to_width",
    "open_console",
    "print_table",
    "render_code",
    "render_details",
    "render_keys",
    "render_panels",
    "render_paragraph",
    "render_table",
    "to_csv",
    "to_html",
    "to_rich",
]
