"""MkDocs hook that creates a site page for each file outside docs/ to which a page links.

A link such as ``../tests/conftest.py`` then works both on a git host and on the site, although the site does not know
the repository's address. Markdown files and notebooks become pages; for other files, the page shows the text, and for
folders, it lists the files.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SHOWN = "files"
"""Folder of the site that holds these pages."""
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".csv": "text", ".txt": "text"}
_OUT_OF_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"


def place(path: Path) -> Path:
    """Return the path, among the sources of the site, of a file in the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    name = path.relative_to(ROOT).as_posix()
    return Path(SHOWN) / (name if path.suffix == ".md" else f"{name}.md")


def rewrite(markdown: str, path: Path, found: set[Path]) -> str:
    """Rewrite the links of a page to files outside docs/, and add these files to ``found``.

    Args:
        markdown: text of the page.
        path: the page's file in the repository.
        found: files and folders that have been linked so far.
    """
    own = place(path).parent

    def replace(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(path.parent / match[1]))
        if not target.exists() or (path.is_relative_to(DOCS) and target.is_relative_to(DOCS)):
            return match[0]
        if not target.is_relative_to(DOCS):
            found.add(target)
        return f"]({os.path.relpath(place(target), own)}{match[2] or ''})"

    return LINK.sub(replace, markdown)


def show(path: Path, found: set[Path]) -> str:
    """Return the page of a file or folder outside docs/."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        return _OUT_OF_SEARCH + rewrite(path.read_text(encoding="utf-8"), path, found)
    if path.is_dir():
        text = "\n".join(f"* `{each.name}`" for each in sorted(path.iterdir()) if not each.name.startswith(("_", ".")))
    elif path.suffix == ".ipynb":
        cells = ((cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"])
        text = "\n\n".join(each if kind == "markdown" else f"```python\n{each}\n```" for kind, each in cells)
        return _OUT_OF_SEARCH + rewrite(text, path, found)
    else:
        text = f"`````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8').rstrip()}\n`````"
    return f"{_OUT_OF_SEARCH}# {name}\n\n{text}\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of linked files, and of files to which these files link."""
    found: set[Path] = set()
    for page in files.documentation_pages():
        rewrite(page.content_string, DOCS / page.src_uri, found)
    done: set[Path] = set()
    while left := sorted(found - done):
        for path in left:
            files.append(File.generated(config, place(path).as_posix(), content=show(path, found)))
        done.update(left)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page of docs/."""
    if page.file.src_uri.startswith(f"{SHOWN}/"):
        return markdown
    return rewrite(markdown, DOCS / page.file.src_uri, set())
