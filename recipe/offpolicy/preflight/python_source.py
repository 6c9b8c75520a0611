"""Checks of Python source that is not imported, and recognition of the launched program.

If the source does not show that a contract on a verl function holds, because the source differs or the target is
created when its module runs, the contract is checked by importing the module. The training process imports all targets
in any case, so the import always makes the final decision.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Literal

from verl_patches.contract import Contract, installed_release, literals, looked_up

if TYPE_CHECKING:
    from ..correction.problem import Problem


_FIELD = "response_logprobs"
_OUTPUT = "AgentLoopOutput"
_MOST = 200
"""Largest number of definitions that are searched."""
_MADE_BY_RAY = (".__ray_metadata__.modified_class", "")


def find_source(module: str) -> Path | None:
    """Find the file of a module by its dotted name, as ``python -m`` would; None if there is none."""
    top, *below = module.split(".")
    try:
        # The launch's own directory is searched first; it is given here, because it is not on the path of every process
        # that runs the checks.
        spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path]) or importlib.util.find_spec(top)
    except (ValueError, ImportError):
        return None
    if spec is None:
        return None
    if not below and spec.submodule_search_locations is None:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *below)
        for candidate in (path.with_suffix(".py") if below else path / "__main__.py", path / "__main__.py"):
            if candidate.is_file():
                return candidate
        if (path / "__init__.py").is_file():
            return path / "__init__.py"
    return None


@functools.cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@dataclass(frozen=True)
class LogProbEvidence:
    """What an agent loop's source shows about whether the loop returns log-probs.

    Attributes:
        log_probs: ``unknown`` if the source does not show whether log-probs are returned.
        where: file and line at which an output is created without log-probs; "" if there is none.
    """

    log_probs: Literal["returned", "left out", "unknown"]
    where: str = ""


def find_log_probs(target: str) -> LogProbEvidence:
    """Find out whether a class, or the code outside verl that the class uses, returns log-probs.

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
        if module.split(".")[0] == "verl":
            inherits |= name.endswith("AgentLoop")
            continue
        file, definitions, imported = _parse_module(module)
        if (node := definitions.get(name)) is None:
            asked += [imported[name]] if name in imported else []
            continue
        nodes = list(ast.walk(node))
        if any(map(_hands_on, nodes)):
            return LogProbEvidence("returned")
        for call in nodes:
            if isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == _OUTPUT:
                where = where or f"{file}, line {call.lineno}"
                unclear |= any(keyword.arg is None for keyword in call.keywords)
        names = {each.id for each in nodes if isinstance(each, ast.Name)}
        calls_above |= "super" in names
        asked += [(module, each) for each in names if each in definitions]
        asked += [imported[each] for each in names if each in imported]
    if where and not unclear and not (inherits and calls_above):
        return LogProbEvidence("left out", where)
    return LogProbEvidence("returned" if inherits and not where else "unknown")


def _parse_module(name: str) -> tuple[Path | None, dict[str, ast.AST], dict[str, tuple[str, str]]]:
    """Read a module's file, its definitions by name, and the (module, name) of each name that it imports."""
    file = find_source(name)
    try:
        tree = _parse(file) if file is not None else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        tree = ast.Module([], [])
    package = name if file is not None and file.name == "__init__.py" else name.rpartition(".")[0]
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            imported |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return file, {node.name: node for node in tree.body if isinstance(node, kinds)}, imported


def _hands_on(node: ast.AST) -> bool:
    """Return True if a node passes on, sets or names the log-prob field."""
    match node:
        case ast.keyword(arg=field) if field == _FIELD:
            return not (isinstance(node.value, ast.Constant) and node.value.value is None)
        case ast.Attribute(attr=field, ctx=ast.Store()) | ast.Constant(value=field):
            return bool(field == _FIELD)
    return False


def check_contracts(contracts: Iterable[Contract]) -> None:
    """Check contracts in the source; if the source does not show that they hold, check by import.

    Raises:
        PatchError: a contract is violated.
    """
    for contract in contracts:
        if not holds_in_source(contract):
            contract.check()


def holds_in_source(contract: Contract) -> bool:
    """Return True if the source shows a tested release and has the expected signature, keys and names."""
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


def _find_definition(owner: ast.AST, names: list[str]) -> ast.AST | None:
    """Find the last statement that binds a name in a module or class body; for nested names, proceed name by name."""
    for name in names:
        bound = [node for node in getattr(owner, "body", ()) if name in _list_bound_names(node)]
        if not bound:
            return None
        owner = bound[-1]
    return owner


def _list_bound_names(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [getattr(node, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))]


def _format_signature(node: ast.AST) -> str | None:
    """Format a signature as ``contract.bare_signature`` does; None if it is not the signature of a function."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    bare = copy.deepcopy(node.args)
    for each in ast.walk(bare):
        if isinstance(each, ast.arg):
            each.annotation = None
    return f"({ast.unparse(bare)})"


def _compile(node: ast.AST) -> CodeType:
    """Compile a single function or class without running it."""
    assert isinstance(node, ast.stmt)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        node.decorator_list = []
    whole = compile(ast.Module([node], []), "<seam>", "exec")
    return next((constant for constant in whole.co_consts if isinstance(constant, CodeType)), whole)


OURS = "recipe.offpolicy.main_offpolicy"
VERLS = (
    "verl.trainer.main_ppo",
    "verl.experimental.fully_async_policy.fully_async_main",
    "verl.experimental.one_step_off_policy.main_ppo",
)
"""verl's programs whose trainers and workers the checks support."""
SAMPLERS = ("verl.trainer.main_eval", "verl.trainer.main_generation", "verl.trainer.main_generation_server")
"""verl's programs that do not train, but whose configuration resembles PPO's."""


def find_launched() -> str:
    """Find this process's program, as ``python -m`` names it; if it is not verl's, return its file."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name)
    file = str(getattr(main, "__file__", ""))
    if not os.path.isfile(file):
        return file
    known = {module: find_source(module) for module in (*VERLS, *SAMPLERS)}
    return next((module for module, source in known.items() if source and os.path.samefile(source, file)), file)


def is_own(module: str) -> bool:
    """Return True for a user's own main program, which may register estimators, losses and agent loops with verl."""
    return module not in (OURS, *VERLS)


def check_program_trains(module: str) -> Iterator[Problem]:
    """Reject verl's programs that only sample or evaluate."""
    from ..correction.problem import Problem  # imported late: it imports torch

    if module in SAMPLERS:
        reason = "it trains nothing, so there is no gradient to correct."
        yield Problem("module", module, reason, "Launch it without a correction.", parts=())
