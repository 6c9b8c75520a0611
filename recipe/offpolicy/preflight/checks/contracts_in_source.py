"""Contracts on verl's functions checked against its source: milliseconds, where importing takes seconds.

A contract that the source does not show to hold, because it differs, or because the target is made when its module is
run, is held by importing it. The process that trains imports all of them: the last word is always the import's.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, SimpleNamespace

from verl_patches.contract import Contract, installed_release, literals, looked_up

from .module_source import find_source

_MADE_BY_RAY = (".__ray_metadata__.modified_class", "")


def check_contracts(contracts: Iterable[Contract]) -> None:
    """Check contracts by the source, and by import where the source does not show that one holds.

    Raises:
        PatchError: one does not hold.
    """
    for contract in contracts:
        if not holds_in_source(contract):
            contract.check()


def holds_in_source(contract: Contract) -> bool:
    """Return True if the source shows a tested release, and the signature, keys and names as expected."""
    release = installed_release(contract.distribution)
    module, _, path = contract.target.replace(*_MADE_BY_RAY).partition(":")
    file = find_source(module)
    if release is None or not contract.covers(release) or file is None:
        return False
    found = _find_definition(_parse(file), path.split("."))
    if found is None:
        return False
    if contract.signature is not None and not contract.allows(_format_signature(found)):
        return False
    if not (contract.keys or contract.names):
        return True
    target = SimpleNamespace(__code__=_compile(found))
    return set(contract.keys) <= literals(target) and set(contract.names) <= looked_up(target)


@functools.cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def _find_definition(owner: ast.AST, names: list[str]) -> ast.AST | None:
    """Find the last statement that binds a name in the body of a module or class, and so on inward."""
    for name in names:
        bound = [node for node in getattr(owner, "body", ()) if name in _list_bound_names(node)]
        if not bound:
            return None
        owner = bound[-1]
    return owner


def _list_bound_names(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Assign():
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def _format_signature(node: ast.AST) -> str | None:
    """Format as ``contract.bare_signature`` does; None for what is no function."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    of = inspect.Parameter
    arguments = node.args
    positional: list[tuple[ast.arg, object]] = [(each, of.POSITIONAL_ONLY) for each in arguments.posonlyargs]
    positional += [(each, of.POSITIONAL_OR_KEYWORD) for each in arguments.args]
    without = len(positional) - len(arguments.defaults)
    defaults: list[ast.expr | None] = [*[None] * without, *arguments.defaults]
    parameters = [
        _build_parameter(each.arg, kind, value) for (each, kind), value in zip(positional, defaults, strict=True)
    ]
    if arguments.vararg:
        parameters.append(of(arguments.vararg.arg, of.VAR_POSITIONAL))
    parameters += [
        _build_parameter(each.arg, of.KEYWORD_ONLY, value)
        for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(of(arguments.kwarg.arg, of.VAR_KEYWORD))
    return str(inspect.Signature(parameters))


def _build_parameter(name: str, kind: object, default: ast.expr | None) -> inspect.Parameter:
    value: object = inspect.Parameter.empty
    if default is not None:
        # What is no literal is left to the import.
        value = ast.literal_eval(default) if isinstance(default, ast.Constant) else _OpaqueDefault()
    return inspect.Parameter(name, kind, default=value)  # type: ignore[arg-type]


class _OpaqueDefault:
    """A default that only running the module would determine."""


def _compile(node: ast.AST) -> CodeType:
    """Compile a function or class by itself, without running it."""
    assert isinstance(node, ast.stmt)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        node.decorator_list = []
    whole = compile(ast.Module([node], []), "<seam>", "exec")
    return next((constant for constant in whole.co_consts if isinstance(constant, CodeType)), whole)
