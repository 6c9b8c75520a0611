"""Contracts between patches and their targets, and the errors that are raised when a target has changed.

A contract names the target, the signature quoted from the source for which the patch was written, the keys that the
target's code reads or passes on, and the releases with which the patch was tested. All of these are checked when the
patch is installed. Any difference raises a `PatchError` that names the fix, because a patch that only logs a failure is
worse than no patch. Targets are only wrapped, so no upstream code is copied here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from packaging.specifiers import SpecifierSet

from .releases import TESTED, attributes_of, is_too_old, release_of, specifiers

logger = logging.getLogger("verl_patches")

ALLOW_UNTESTED = "OFFPOLICY_ALLOW_UNTESTED_VERL"
_MARK = "__verl_patch__"
_AND_MORE = ", ...)"


class PatchError(RuntimeError):
    """A patch cannot be installed because its target, the release or the environment is not the expected one."""


class NotInstalledError(PatchError):
    """The distribution that a patch targets is not installed."""


Key = str | tuple[str, ...]


@dataclass(frozen=True)
class Contract:
    """The properties that a patch expects its target to have.

    Attributes:
        name: short, unique name of the patch, shown in logs and by `verl_patches.status()`.
        target: "module:attribute.path" of the callable to wrap or the object to extend.
        signature: parameters with defaults but without annotations, as printed by `bare_signature`, quoted from
            upstream's source; None if Python cannot read a signature from the target. "(self, data, ...)" quotes only
            the first parameters, for a wrapper that passes on all others.
        distribution: the installed distribution whose release is checked, or "python".
        releases: version specifier of the releases that were tested, for instance "==0.9.1", or a tuple of
            alternatives, ("==0.7.1", "==0.8.0").
        keys: literals that the target's code, including nested functions, must contain. Each literal is a string, or a
            tuple of three or more strings that must appear as a complete list or tuple, so that an additional key is
            detected too.
        names: globals and attributes that the target's code, including nested functions, must look up. If the code no
            longer looks up a name, overriding or replacing it has no effect.
        option: the configuration key that needs the contract; empty if every run needs it.
    """

    name: str
    target: str
    signature: str | None
    distribution: str
    releases: str | tuple[str, ...]
    keys: tuple[Key, ...] = ()
    names: tuple[str, ...] = ()
    option: str = ""

    def check(self) -> Any:
        """Check release, signature, keys and names, and return the target.

        Raises:
            NotInstalledError: the distribution is not installed.
            PatchError: the release was not tested and untested releases are not allowed; or the target does not exist
                or cannot be imported; or its signature, keys or names differ.
        """
        self._check_release()
        target = resolve(self.target)
        found = None if target is None else self._inspect(target)
        if found is None:
            raise PatchError(self.moved("nothing of that name"))
        if self.signature is not None and not self.allows(bare_signature(found)):
            raise PatchError(self.moved(bare_signature(found)))
        if self.keys and (missing := [key for key in self.keys if key not in literals(found)]):
            expected = f"its code to contain {', '.join(map(repr, missing))}"
            raise PatchError(self.moved(f"none of it in {_held(found)}", expected))
        if self.names and (missing := sorted(set(self.names) - looked_up(found))):
            raise PatchError(self.moved("code that does not", f"its code to look up {', '.join(missing)}"))
        return target

    def _inspect(self, target: Any) -> Any:
        """Return the object whose signature and code are checked; None if there is no such object."""
        return target

    def allows(self, signature: str | None) -> bool:
        """Return True if a bare signature equals the quoted signature, or starts with it if the quote ends in "..."."""
        quoted = self.signature or ""
        if signature is not None and quoted.endswith(_AND_MORE):
            stem = quoted.removesuffix(_AND_MORE)
            return signature.startswith((f"{stem},", f"{stem})"))
        return signature == self.signature

    def in_force(self) -> bool:
        """Return True if this patch wraps the target in this process. Imports nothing and never raises."""
        return is_wrapped(loaded(self.target), self.name)

    def covers(self, release: str) -> bool:
        """Return True if the release was tested."""
        return any(SpecifierSet(each).contains(release, prereleases=True) for each in self._alternatives())

    @property
    def tested(self) -> str:
        """Format distribution and releases for a message or a table: "verl==0.7.1 or ==0.8.0"."""
        return f"{self.distribution}{' or '.join(self._alternatives())}"

    def _alternatives(self) -> tuple[str, ...]:
        return (self.releases,) if isinstance(self.releases, str) else self.releases

    def _check_release(self) -> None:
        release = installed_release(self.distribution)
        if release is None:
            raise NotInstalledError(
                f"patch {self.name!r} needs the distribution {self.distribution!r}, which is not installed. "
                f"Fix: install {self.tested}."
            )
        if self.covers(release):
            return
        if os.environ.get(ALLOW_UNTESTED) == "1":
            _warn_untested(self.distribution, release)
            return
        raise PatchError(
            f"patch {self.name!r} was tested with {self.tested}, but the installed release is {release}. Fix: install "
            f"a tested release, or set {ALLOW_UNTESTED}=1 to try this release; the target's signature is checked in "
            "any case."
        )

    def moved(self, found: str, expected: str | None = None) -> str:
        """Build the error message for an unexpected target: what was expected, what was found, and the fix."""
        needed = f", which {self.option} needs" if self.option else ""
        return (
            f"patch {self.name!r}{needed}: the target {self.target} has changed. Expected "
            f"{expected or self.signature or 'it to exist'}, found {found}. Fix: install {self.tested}, or "
            f"read the new target and adapt the patch and its contract (see verl_patches/README.md)."
        )


@dataclass(frozen=True)
class Seams:
    """Factory of contracts on attributes of one module or class of verl that a run calls or overrides.

    Attributes:
        owner: the module or class, as "module" or "module:Class".
        releases, option: the contract's fields of the same names.
    """

    owner: str
    releases: tuple[str, ...] = specifiers(lambda release: True)
    option: str = ""

    def __call__(self, quoted: str, *, name: str = "", keys: str | tuple[Key, ...] = (), names: str = "") -> Contract:
        """Build the contract on an attribute.

        Args:
            quoted: the attribute with its signature, such as "step(self, metrics)"; without parentheses, the signature
                is not checked.
            name: name of the contract; by default, the attribute's name.
            keys, names: the contract's fields of the same names, as strings separated by spaces.
        """
        attribute, opened, rest = quoted.partition("(")
        target = f"{self.owner}{'.' if ':' in self.owner else ':'}{attribute}"
        keys = tuple(keys.split()) if isinstance(keys, str) else keys
        signature = f"({rest}" if opened else None
        return Contract(
            name or attribute, target, signature, "verl", self.releases, keys, tuple(names.split()), self.option
        )


def check_all(contracts: Iterable[Contract]) -> None:
    """Check each contract against the installed releases.

    Raises:
        PatchError: a function has changed, or the release was not tested and untested releases are not allowed.
    """
    for contract in contracts:
        contract.check()


@functools.cache
def _warn_untested(distribution: str, release: str) -> None:
    logger.warning(
        "%s %s is untested, so every function that the run uses is checked against its contract", distribution, release
    )


def of_installed(*contracts: Contract) -> Contract:
    """Return the contract for the installed release, given one contract per release.

    If no contract covers the release, the last contract is returned. Its `check` then fails unless untested releases
    are allowed.
    """
    release = installed_release(contracts[0].distribution)
    return next((each for each in contracts if release and each.covers(release)), contracts[-1])


def installed_release(distribution: str) -> str | None:
    """Return the installed version of a distribution, without the local part; None if it is not installed.

    verl's version is read from the version file of the package that an import would find, because a checkout on the
    path may have no metadata, and may take precedence over an installed release that has metadata.
    """
    if distribution == "python":
        return platform.python_version()
    if distribution == "verl" and (release := _release_beside("verl")):
        return release
    return _metadata_release(distribution)


def _metadata_release(distribution: str) -> str | None:
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    return release_of(version) if distribution == "verl" else version.partition("+")[0]


def demand_release() -> str:
    """Return the release of verl that an import would find, without importing verl; it must be supported.

    Raises:
        PatchError: verl is missing, or its release is too old, or is unsupported and not allowed.
    """
    release = installed_release("verl")
    supported = f"Supported: {', '.join(TESTED)}."
    if release is None:
        raise PatchError(f"verl is not installed. {supported} Fix: pip install verl=={TESTED[-1]}.")
    if release in TESTED or (os.environ.get(ALLOW_UNTESTED) == "1" and not is_too_old(release)):
        return release
    fix = f"pip install verl=={attributes_of(release).name}"
    folder = location("verl")
    if folder is not None and _metadata_release("verl") != release:  # a checkout, which pip does not replace
        fix += f", and remove {folder.parent} from PYTHONPATH"
    if not is_too_old(release):
        fix += f"; or set {ALLOW_UNTESTED}=1 to try this release; every function that the correction needs is checked"
    raise PatchError(f"verl {release} in {folder} is not supported. {supported} Fix: {fix}.")


def location(package: str) -> Path | None:
    """Return the folder of a top-level package, without importing it; None if there is none."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # the package is being imported, or is a stand-in, and has no spec
        return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def _release_beside(package: str) -> str | None:
    folder = location(package)
    file = folder / "version" / "version" if folder else None
    return release_of(file.read_text()) if file and file.is_file() else None


def resolve(target: str) -> Any:
    """Return the object named by "module:attribute.path"; None if the module or the attribute does not exist.

    Raises:
        PatchError: the module exists but cannot be imported, for example because another module is missing.
    """
    module_name, _, path = target.partition(":")
    try:
        return _attribute(importlib.import_module(module_name), path)
    except PatchError:  # a patch that waited for this import has raised this error
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            return None
        proposed = (
            "install the missing module" if isinstance(error, ImportError) else "follow the advice in the error message"
        )
        raise PatchError(f"{target} cannot be imported: {error}. Fix: {proposed}.") from error


def loaded(target: str) -> Any:
    """Like `resolve`, but only look in modules that this process has already imported. Never raises."""
    module_name, _, path = target.partition(":")
    try:
        return _attribute(sys.modules.get(module_name), path)
    except ImportError:  # the module may import this attribute on access
        return None


def _attribute(owner: Any, path: str) -> Any:
    try:
        return None if owner is None else functools.reduce(getattr, path.split("."), owner)
    except AttributeError:
        return None


def is_needed(error: ModuleNotFoundError) -> bool:
    """Return True if the missing module belongs to verl or to this package; every patch needs both."""
    return (error.name or "").partition(".")[0] in {"verl", "recipe", __name__.partition(".")[0]}


def bare_signature(function: Callable[..., Any]) -> str:
    """Return the signature without annotations, because upstream may change annotations without changing calls.

    Wrappers are unwrapped, so the result for a patched target is its original signature.
    """
    signature = inspect.signature(function)
    # Ray adds a parameter to the methods of actor classes.
    parameters = [p for p in signature.parameters.values() if p.name != "_ray_trace_ctx"]
    bare = [p.replace(annotation=p.empty) for p in parameters]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def literals(target: Any) -> frozenset[Key]:
    """Collect the strings, and tuples and lists of strings, in the code of a function or of a class's methods.

    Python's bytecode stores a list literal as a constant only if it has three or more items, so shorter lists are not
    found.
    """
    return frozenset(constant for code in _codes(target) for constant in _constants(code))


def looked_up(target: Any) -> frozenset[str]:
    """Collect the globals and attributes that the code of a function or of a class's methods looks up by name."""
    return frozenset(name for code in _codes(target) for name in _names(code))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _codes(target: Any) -> Iterator[CodeType]:
    if inspect.isclass(target):
        for member in vars(target).values():
            if not inspect.isclass(member):
                yield from _codes(member)
        return
    # Methods of a class or an instance store their function in __func__.
    target = inspect.unwrap(getattr(target, "__func__", target))
    if isinstance(code := getattr(target, "__code__", None), CodeType):
        yield code


def _constants(code: CodeType) -> Iterator[Key]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            words = tuple(word for word in constant if isinstance(word, str))
            yield from words
            if isinstance(constant, tuple) and len(words) == len(constant):
                yield words


def _held(target: Any) -> str:
    """Format the keys in a target's code for a message, omitting sentences such as docstrings."""
    words = sorted(key for key in literals(target) if isinstance(key, str) and key.isidentifier())
    return ", ".join(words) or "a target without Python code"


def wrap(contract: Contract, wrapper: Callable[..., Any]) -> bool:
    """Wrap the target in `wrapper(original, *args, **kwargs)`, once.

    The wrapper of a coroutine function is also a coroutine function according to `inspect`, and returns an awaitable. A
    static method stays static.

    Returns:
        True if this call wrapped the target; False if this patch was already in force.

    Raises:
        PatchError: the contract is not met, or the target is a class method, which a wrapper would detach from its
            class.
    """
    original = contract.check()
    if is_wrapped(original, contract.name):
        return False
    module_name, _, path = contract.target.partition(":")
    *owners, attribute = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module_name))
    kind = inspect.getattr_static(owner, attribute)
    if isinstance(kind, classmethod):
        raise PatchError(contract.moved("a class method", "a function or a static method"))
    patched = _in_front_of(original, wrapper)
    # functools.wraps copies the attributes of earlier wrappers, so this wrapper's own name is set last.
    setattr(patched, _MARK, contract.name)
    setattr(owner, attribute, staticmethod(patched) if isinstance(kind, staticmethod) else patched)
    logger.info("patch %s in force on %s", contract.name, contract.target)
    return True


def _in_front_of(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    @functools.wraps(original)
    async def patched_coroutine(*args: Any, **kwargs: Any) -> Any:
        awaitable: Awaitable[Any] = wrapper(original, *args, **kwargs)
        return await awaitable

    return patched_coroutine if inspect.iscoroutinefunction(original) else patched


def is_wrapped(function: Any, name: str) -> bool:
    """Return True if one of the wrappers of `function` is the patch `name`."""
    while function is not None:
        # Builtins have no __dict__. Other wrappers of the same target may surround this one, or be inside it.
        if getattr(function, "__dict__", {}).get(_MARK) == name:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
