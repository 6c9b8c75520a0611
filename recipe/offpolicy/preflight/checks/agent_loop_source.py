"""Static check that an agent loop returns the engine's log-probs, from its source and without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .module_source import find_source

_FIELD = "response_logprobs"
_OUTPUT = "AgentLoopOutput"
_VERL = "verl"
_MOST = 200
"""Most definitions that are searched."""


@dataclass(frozen=True)
class LogProbEvidence:
    """Evidence in an agent loop's source on whether it returns log-probs.

    Attributes:
        log_probs: ``unknown`` where the source does not show it.
        where: file and line of an output created without them; "" if there is none.
    """

    log_probs: Literal["returned", "left out", "unknown"]
    where: str = ""


@dataclass(frozen=True)
class _Module:
    file: Path
    definitions: dict[str, ast.AST]
    imported: dict[str, tuple[str, str]]


def find_log_probs(target: str) -> LogProbEvidence:
    """Search a class, and what it uses of the same author's code, for returned log-probs.

    Args:
        target: the class by its dotted name.
    """
    module, _, name = target.rpartition(".")
    asked, seen, where = [(module, name)], set[tuple[str, str]](), ""
    inherits, calls_above, unclear = False, False, False
    while asked and len(seen) < _MOST:
        module, name = asked.pop(0)
        if (module, name) in seen or not module:
            continue
        seen.add((module, name))
        if module.split(".")[0] == _VERL:
            inherits |= name.endswith("AgentLoop")
            continue
        read = _parse_module(module)
        node = read.definitions.get(name) if read else None
        if read is None or node is None:
            if read is not None and name in read.imported:
                asked.append(read.imported[name])
            continue
        if _hands_on(node):
            return LogProbEvidence("returned")
        for call in _find_outputs(node):
            where = where or f"{read.file}, line {call.lineno}"
            unclear |= any(keyword.arg is None for keyword in call.keywords)
        names = set(_list_names(node))
        calls_above |= "super" in names
        asked += [(module, each) for each in names if each in read.definitions]
        asked += [read.imported[each] for each in names if each in read.imported]
    if where and not unclear and not (inherits and calls_above):
        return LogProbEvidence("left out", where)
    return LogProbEvidence("returned" if inherits and not where else "unknown")


def _parse_module(name: str) -> _Module | None:
    file = find_source(name)
    if file is None:
        return None
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, SyntaxError, ValueError):
        return None
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    definitions: dict[str, ast.AST] = {}
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            imported |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            definitions[node.name] = node
    return _Module(file, definitions, imported)


def _list_names(node: ast.AST) -> Iterator[str]:
    return (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


def _find_outputs(node: ast.AST) -> Iterator[ast.Call]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and ast.unparse(each.func).split(".")[-1] == _OUTPUT:
            yield each


def _hands_on(node: ast.AST) -> bool:
    """Return True if the field is passed, set or named anywhere."""
    for each in ast.walk(node):
        match each:
            case ast.keyword(arg=field) if field == _FIELD:
                if not (isinstance(each.value, ast.Constant) and each.value.value is None):
                    return True
            case ast.Attribute(attr=field, ctx=ast.Store()) if field == _FIELD:
                return True
            case ast.Constant(value=field) if field == _FIELD:
                return True
    return False
