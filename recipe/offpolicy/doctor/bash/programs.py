"""Programs that only read and print; the interpreter runs them because a script's branches often depend on them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

from .shell_values import LARGEST, PATTERN, Field

_ANY = frozenset({"basename", "cat", "cut", "dirname", "expr", "grep", "egrep", "fgrep", "head", "nproc", "realpath"})
_ANY |= {"readlink", "seq", "tail", "tr", "uname", "wc", "whoami"}
_PYTHON = re.compile(r"(.*/)?python[\d.]*")
_SECONDS = 5
_IMPORTS = {"importlib", "importlib.util", "importlib.metadata", "os", "sys", "pathlib"}
_CALLS = {
    *("importlib.metadata.version", "importlib.util.find_spec", "os.path.dirname", "os.path.join", "pathlib.Path"),
    *("print", "str", "sys.exit"),
}
_NODES = (
    *(ast.Module, ast.Import, ast.alias, ast.Assign, ast.Expr, ast.If, ast.Pass, ast.Call, ast.keyword, ast.Attribute),
    *(ast.Name, ast.Constant, ast.Subscript, ast.Tuple, ast.List, ast.IfExp, ast.JoinedStr, ast.FormattedValue),
    *(ast.BoolOp, ast.boolop, ast.Compare, ast.cmpop, ast.UnaryOp, ast.Not, ast.USub, ast.expr_context),
    # Operators that can create large values, such as "a" * 10**10, are not allowed in a look-up.
    *(ast.BinOp, ast.Add, ast.Div),
)
"""Names and syntax allowed in code that only looks up modules or releases."""
# The standard library takes precedence over modules with the same names; a process that is killed gives no answer.
_ISOLATED = """import importlib.metadata, importlib.util, os, pathlib, sys, sysconfig
library = sysconfig.get_paths()
sys.path[:] = [library["stdlib"], os.path.join(library["platstdlib"], "lib-dynload"), *sys.argv.pop().split(os.pathsep)]
del library, sysconfig
sys.excepthook = lambda kind, *rest: os.kill(os.getpid(), 9) if kind is MemoryError else None
"""
_MEMORY = 512 * 2**10
"""Memory limit of a program in KiB."""
_LIMITED = ["/bin/sh", "-c", f'ulimit -v {_MEMORY}; ulimit -f {LARGEST // 512}; exec "$@"', "sh"]


def read_text(path: Path) -> str:
    """Read a text file that is not too large.

    Raises:
        OSError: the file cannot be read, or is too long.
        UnicodeDecodeError: the file is not text.
    """
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise OSError(f"{path} is longer than {LARGEST} bytes")
    return content.decode()


def is_read_only(words: list[str]) -> bool:
    """Return True if a program with these arguments only reads and prints, and changes nothing."""
    name, *arguments = words
    if name in _ANY:
        # tail -f does not end.
        return name != "tail" or not any(each.startswith(("-f", "-F", "--follow")) for each in arguments)
    if name == "date":
        return all(each.startswith("+") or each == "-u" for each in arguments)
    if name == "hostname":
        return all(each in ("-s", "-f", "-i", "-I") for each in arguments)
    return False


def run_program(words: list[str], directory: Path, given: str) -> tuple[str, bool] | None:
    """Run a read-only program; return None if it runs too long, prints too much, or prints something other than text.

    Args:
        directory: working directory of the program.
        given: its input.
    """
    # If the search path contained a relative folder, programs would be searched for in the script's folder.
    folders = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if os.path.isabs(folder)]
    environment = {**os.environ, "PATH": os.pathsep.join(folders)}
    with tempfile.TemporaryFile() as printed:
        try:
            done = subprocess.run(
                [*_LIMITED, *words],
                cwd=directory,
                input=given.encode(),
                stdout=printed,
                stderr=subprocess.DEVNULL,
                env=environment,
                timeout=_SECONDS,
                check=False,
            )
            printed.seek(0)
            # A negative status is the number of a signal, e.g. because the output is too long.
            return (printed.read().decode(), done.returncode == 0) if done.returncode >= 0 else None
        except (subprocess.TimeoutExpired, UnicodeDecodeError):
            return None
        except (OSError, ValueError):
            return "", False


def is_lookup(code: str) -> bool:
    """Return True if Python code only looks up modules' locations or releases."""
    tree = _parse(code)
    return tree is not None and all(isinstance(node, _NODES) and _is_harmless(node) for node in ast.walk(tree))


def _is_harmless(node: ast.AST) -> bool:
    """Return False for an import, assignment, call, attribute or format that may do more than look up."""
    match node:
        case ast.Import(names=names):
            return all(alias.name in _IMPORTS and not alias.asname for alias in names)
        case ast.Assign(targets=targets):
            taken = {"print", "str", *(name.partition(".")[0] for name in _IMPORTS)}
            return all(isinstance(target, ast.Name) and target.id not in taken for target in targets)
        case ast.Call(func=function, args=arguments, keywords=keywords):
            name = ast.unparse(function)
            if name == "importlib.util.find_spec":  # which would import the parents of a nested module
                return [type(each) for each in arguments] == [ast.Constant] and "." not in ast.unparse(arguments[0])
            return name in _CALLS and not any(keyword.arg in ("file", None) for keyword in keywords)
        case ast.Attribute(attr=name):
            return not name.startswith("_")
        case ast.FormattedValue(format_spec=spec):
            return spec is None
    return True


def run_lookup(code: str) -> tuple[str, bool] | None:
    """Run look-up code in this interpreter, isolated, with this process's module path."""
    found_in = os.pathsep.join(map(os.path.abspath, ["", *sys.path]))
    return run_program([sys.executable, "-I", "-c", f"{_ISOLATED}{code}", found_in], Path.cwd(), "")


def list_imports(code: str) -> list[str]:
    """List the modules that code imports; empty if it does anything else."""
    tree = _parse(code)
    statements = tree.body if tree is not None else []
    names = [alias.name for each in statements if isinstance(each, ast.Import) for alias in each.names]
    return names if all(isinstance(each, ast.Import) for each in statements) else []


def _parse(code: str) -> ast.Module | None:
    try:
        return ast.parse(code) if len(code) <= PATTERN else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def is_importable(module: str) -> bool:
    """Return True if the top-level module exists; it is not imported."""
    try:
        return PathFinder.find_spec(module.partition(".")[0], [os.getcwd(), *sys.path]) is not None
    except (ImportError, ValueError):
        return False


def find_python_code(words: list[str], given: str) -> str | None:
    """Return the code of ``python -c CODE``, or of ``python -`` with this input; None for other calls."""
    if not _PYTHON.fullmatch(words[0]):
        return None
    if words[1:] == ["-"]:
        return given
    return words[2] if words[1:2] == ["-c"] and len(words) == 3 else None


def find_inner_script(words: list[Field]) -> list[Field] | None:
    """Return what a shell call runs: -c and its text, or a file and its arguments; None for other programs."""
    for index, word in enumerate(words):
        if isinstance(word, str) and re.fullmatch(r"(.*/)?(xargs|parallel)", word):
            return None  # these options change the text
        if isinstance(word, str) and re.fullmatch(r"(.*/)?(ba|z)?sh", word):
            rest = words[index + 1 :]
            while rest and isinstance(rest[0], str) and rest[0].startswith("-") and not rest[0].endswith("c"):
                rest = rest[1:]
            if rest and isinstance(rest[0], str) and re.fullmatch(r"-\w*c", rest[0]):
                return ["-c", *rest[1:]]
            return rest or None
    return None


def shorten(words: list[Field]) -> str:
    """Format a command in one line of at most 60 characters."""
    shown = " ".join(word if isinstance(word, str) else "..." for word in words).split("\n")[0]
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
