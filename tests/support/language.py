"""Lint of prose: words that this project does not use in comments, docstrings, messages and documents.

Usage: ``python -m tests.support.language`` lists each with its file and line; the exit status is 1 if there is one.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

WORDS = {
    r"beside": "next to, or together with",
    r"anew": "again",
    r"in (?:the )?place of": "instead of",
    r"nobody(?!/)": "no one",
    r"mend(?:s|ed|ing)?(?!_)": "fix",
    r"whatever it be": "any",
    r"goes without": "has no",
    r"reckoned": "computed",
}
"""Pattern -> what to write instead."""
PATTERN = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
SELF = Path(__file__).resolve()


def list_prose(path: Path) -> Iterator[tuple[int, str]]:
    """List the prose lines of a file, with their numbers: in code, comments and strings that contain a space."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    if path.suffix in (".yaml", ".sh", ".toml"):
        yield from ((at, line) for at, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#"))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            yield from enumerate(token.string.splitlines(), token.start[0])


def find_words() -> list[str]:
    """Find the words in all files that git tracks, and return lines to print."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    paths = [ROOT / name for name in listed if name.endswith((".py", ".md", ".yaml", ".sh", ".toml"))]
    return [
        f"{path.relative_to(ROOT)}:{at}: {found[0]!r}. {line.strip()[:100]}"
        for path in paths
        if path.exists() and path != SELF and not path.is_relative_to(ROOT / "tests" / "data")
        for at, line in list_prose(path)
        if (found := PATTERN.search(line))
    ]


if __name__ == "__main__":
    found = find_words()
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.exit(bool(found))
