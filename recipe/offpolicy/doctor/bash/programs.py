"""The programs that only look, and are run: a script's choices often depend on what they say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from .values import Field

_ANY = frozenset({"basename", "cat", "cut", "dirname", "expr", "grep", "egrep", "fgrep", "head", "nproc", "realpath"})
_ANY |= {"readlink", "seq", "tail", "tr", "uname", "wc", "whoami"}
_PYTHON = re.compile(r"(.*/)?python[\d.]*")
_SECONDS = 5
_IMPORTS = frozenset({"importlib", "importlib.util", "importlib.metadata", "os", "sys", "pathlib"})
_CALLS = frozenset(
    {
        "importlib.metadata.version",
        "importlib.util.find_spec",
        "os.path.dirname",
        "os.path.join",
        "pathlib.Path",
        "print",
        "str",
        "sys.exit",
    }
)
_STATEMENTS = (ast.Import, ast.Assign, ast.Expr, ast.If, ast.Pass)


def looks_only(words: list[str]) -> bool:
    """Whether a program with these arguments reads, prints, and changes nothing."""
    name, *arguments = words
    if name in _ANY:
        # tail -f has no end.
        return name != "tail" or not any(each.startswith(("-f", "-F", "--follow")) for each in arguments)
    if name == "date":
        return all(each.startswith("+") or each == "-u" for each in arguments)
    if name == "hostname":
        return all(each in ("-s", "-f", "-i", "-I") for each in arguments)
    return False


def output_of(words: list[str], directory: Path, given: str) -> tuple[str, bool]:
    """What such a program prints, and whether it succeeds.

    Args:
        directory: in which it runs.
        given: its input.
    """
    try:
        done = subprocess.run(
            words, cwd=directory, input=given, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return "", False
    return done.stdout, done.returncode == 0


def is_lookup(code: str) -> bool:
    """Whether Python code does no more than find out where a module lies, or which release it is."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
            return False
        if isinstance(node, ast.Import) and any(alias.name not in _IMPORTS or alias.asname for alias in node.names):
            return False
        if isinstance(node, ast.Assign) and not all(isinstance(target, ast.Name) for target in node.targets):
            return False
        if isinstance(node, ast.Assign) and {target.id for target in node.targets if isinstance(target, ast.Name)} & {
            "print",
            "str",
            *(name.partition(".")[0] for name in _IMPORTS),
        }:
            return False
        if isinstance(node, ast.Call) and (ast.unparse(node.func) not in _CALLS or not _harmless(node)):
            return False
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            return False
        if isinstance(node, ast.Lambda | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            return False
    return True


def _harmless(call: ast.Call) -> bool:
    """find_spec of a top-level module imports nothing; of one below, its parents."""
    if ast.unparse(call.func) != "importlib.util.find_spec":
        return not any(keyword.arg in ("file", None) for keyword in call.keywords)
    return [type(each) for each in call.args] == [ast.Constant] and "." not in str(call.args[0].value)  # type: ignore[attr-defined]


def answer_of(code: str, directory: Path) -> tuple[str, bool]:
    """What such code prints, by this interpreter."""
    return output_of([sys.executable, "-c", code], directory, "")


def python_code(words: list[str], given: str) -> str | None:
    """The code that a call of Python runs, where that is given with it."""
    if not _PYTHON.fullmatch(words[0]):
        return None
    if words[1:] == ["-"]:
        return given
    return words[2] if words[1:2] == ["-c"] and len(words) == 3 else None


def script_of(words: list[Field]) -> list[Field] | None:
    """What a call of bash reads: -c and its text, or a file and its arguments."""
    for index, word in enumerate(words):
        if isinstance(word, str) and re.fullmatch(r"(.*/)?(ba|z)?sh", word):
            rest = words[index + 1 :]
            while rest and isinstance(rest[0], str) and rest[0].startswith("-") and not rest[0].endswith("c"):
                rest = rest[1:]
            if rest and isinstance(rest[0], str) and re.fullmatch(r"-\w*c", rest[0]):
                return ["-c", *rest[1:]]
            return rest or None
    return None


def short(words: list[Field]) -> str:
    shown = " ".join(word if isinstance(word, str) else "..." for word in words).split("\n")[0]
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
