"""Fast imports of verl for a process that calls only a few of its functions and does not train.

verl's modules import packages that only a run needs, such as Ray, transformers and datasets. Importing them takes
several seconds. After `install()`, such an import runs only when a name that it binds is first looked up, as in
Python's `lazy import` (PEP 810). The process runs verl's own code with the same objects, but does not import unused
modules.

The following imports still run immediately: the standard library, `from x import *`, imports inside `with`, and imports
inside a `try` that contains other statements. Annotations of functions are not evaluated; annotations of fields are
evaluated, because dataclasses read them.

tensordict, which verl's protocol needs, imports two decorators from PyTorch's compiler, which is slow to import. These
decorators affect only compiled code, so tensordict receives no-op decorators instead. Other names in
`torch._dynamo` still come from the compiler.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from .deferred import find_behind

_REGISTER = "__lazy_import__"
_EVERYTHING = "__all__"


_COMPILER = "torch._dynamo"


def install(package: str = "verl") -> None:
    """Make a package's imports lazy in this process, and keep tensordict from importing the compiler. Idempotent."""
    for finder in (_build_finder(package), _TENSORDICT):
        if finder not in sys.meta_path:
            sys.meta_path.insert(0, finder)


class _SourceFinder(importlib.abc.MetaPathFinder):
    """Import finder for selected modules; later finders must find these modules as source files.

    Args:
        chooses: returns True for the full name of a module that ``loader`` must load.
        loader: class of the replacement loader; called with the arguments of the loader that was found.
    """

    def __init__(self, chooses: Callable[[str], bool], loader: type[importlib.machinery.SourceFileLoader]) -> None:
        self._chooses, self._loader = chooses, loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self._chooses(fullname) or self not in sys.meta_path:
            return None
        spec = find_behind(self, fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = self._loader(spec.loader.name, spec.loader.path)
        return spec


@functools.cache
def _build_finder(package: str) -> _SourceFinder:
    return _SourceFinder(lambda module: module.partition(".")[0] == package, _Loader)


class _WithoutCompiler(importlib.machinery.SourceFileLoader):
    """Loader that replaces the compiler's decorators with dummies while its module is imported."""

    def exec_module(self, module: ModuleType) -> None:
        marks = ModuleType(_COMPILER)
        vars(marks).update(
            assume_constant_result=lambda function: function,
            graph_break=lambda *reason: None,
            __getattr__=_ask_compiler,
        )
        sys.modules[_COMPILER] = marks
        try:
            super().exec_module(module)
        finally:
            if sys.modules.get(_COMPILER) is marks:
                del sys.modules[_COMPILER]


_TENSORDICT = _SourceFinder(lambda module: module == "tensordict" and _COMPILER not in sys.modules, _WithoutCompiler)


def _ask_compiler(name: str) -> Any:
    if name.startswith("__"):  # the import system looks up its own attributes on each module
        raise AttributeError(name)
    sys.modules.pop(_COMPILER, None)
    return getattr(importlib.import_module(_COMPILER), name)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loader of a module whose imports run when their names are first looked up."""

    def exec_module(self, module: ModuleType) -> None:
        tree = ast.parse(self.get_data(self.path), self.path)
        if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
            super().exec_module(module)  # the module defines its own ``__getattr__``
            return
        names = _Names(module, self.path)
        _register_imports(tree.body, names.statements)
        _leave_annotations_out(tree)
        namespace = vars(module)
        namespace["__builtins__"] = names
        namespace["__getattr__"] = names.get_attribute
        # The module is compiled without the future statements of this file.
        exec(compile(tree, self.path, "exec", dont_inherit=True), namespace)


class _Names(dict[str, Any]):
    """A module's builtins, where Python looks up a name last. The lookup here runs the import that binds the name.

    Attributes:
        statements: the module's lazy imports.
    """

    def __init__(self, module: ModuleType, file: str) -> None:
        super().__init__(vars(builtins))
        self.statements: list[ast.stmt] = []
        self._module, self._file = module, file
        self._waiting: dict[str, list[ast.stmt]] = {}
        self[_REGISTER] = self._register

    def __missing__(self, name: str) -> Any:
        namespace = vars(self._module)
        try:
            self._import(name)
        except KeyError as error:  # Python would report a KeyError as an undefined name
            raise LookupError(f"{name} cannot be imported: {error!r}") from error
        if name not in namespace:
            raise KeyError(name)
        return namespace[name]

    def get_attribute(self, name: str) -> Any:
        """Look up a name that code outside the module requests; used as the module's ``__getattr__``."""
        if name == _EVERYTHING:  # ``import *`` first looks for ``__all__``, otherwise takes the bound names
            for each in list(self._waiting):
                self._import(each)
        self._import(name)
        if name not in vars(self._module):
            raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r}")
        return vars(self._module)[name]

    def _import(self, name: str) -> None:
        for statement in self._waiting.pop(name, ()):
            self._run(statement)

    def _register(self, place: int) -> None:
        """Register a delayed import at the position of its statement."""
        statement = self.statements[place]
        names = set(_list_bound_names(statement))
        if any(name in self or name in vars(self._module) for name in names):
            self._run(statement)  # a name that is already bound is never looked up here
            return
        for name in names:
            self._waiting.setdefault(name, []).append(statement)

    def _run(self, statement: ast.stmt) -> None:
        exec(compile(ast.Module([statement], []), self._file, "exec", dont_inherit=True), vars(self._module))


def _register_imports(body: list[ast.stmt], statements: list[ast.stmt]) -> None:
    """Replace each import that can be delayed, in place, with a call that registers the import in ``statements``."""
    changed: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If):
            _register_imports(statement.body, statements)
            _register_imports(statement.orelse, statements)
        for part in _split(statement):
            if _can_wait(part):
                call = ast.Call(ast.Name(_REGISTER, ast.Load()), [ast.Constant(len(statements))], [])
                statements.append(part)
                part = ast.fix_missing_locations(ast.copy_location(ast.Expr(call), statement))
            changed.append(part)
    body[:] = changed


def _split(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Split an import of several names into single imports."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        yield statement
        return
    for alias in statement.names:
        single = (
            ast.Import([alias])
            if isinstance(statement, ast.Import)
            else ast.ImportFrom(statement.module, [alias], statement.level)
        )
        yield ast.copy_location(single, statement)


def _can_wait(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import(names=[alias]):
            return not _is_standard(alias.name)
        case ast.ImportFrom(module=module, names=[alias], level=level):
            return alias.name != "*" and (level > 0 or not _is_standard(module or ""))
        case ast.Try(body=body, finalbody=[]):
            return all(_can_wait(part) for inner in body for part in _split(inner))
    return False


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _list_bound_names(node: ast.AST) -> Iterator[str]:
    """List the names that a statement binds in its module."""
    match node:
        case ast.alias(name=name, asname=asname):
            yield asname or name.partition(".")[0]
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _list_bound_names(child)


def _leave_annotations_out(scope: ast.Module | ast.stmt) -> None:
    """Remove annotations that no code reads, because Python would evaluate them on import."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
        elif isinstance(node, ast.stmt):
            _leave_annotations_out(node)
