"""Tables, figures and self-contained HTML pages of the command-line tools.

They are independent of corrections. Rich, matplotlib, Bokeh and Jinja2 are imported where they are used.
"""

from .page import Block, Code, Details, Page
from .plotting import PageError, check_target
from .table import Column, Table, fit_to_width, open_console, print_blocks, print_table, to_html, to_plain, to_rich

__all__ = [
    "Block",
    "Code",
    "Column",
    "Details",
    "Page",
    "PageError",
    "Table",
    "check_target",
    "fit_to_width",
    "open_console",
    "print_blocks",
    "print_table",
    "to_html",
    "to_plain",
    "to_rich",
]
