"""What a patch expects of its target, and what happens when the target has moved.

A patch states the target, the signature quoted from the source it was written against, and the releases it
was tested on. All three are checked when it is installed; a difference raises `PatchError` with the mend,
because a patch that logs and carries on is worse than none. Wrapping is the only way to change a target,
so upstream's code is never copied here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

logger = logging.getLogger("verl_patches")

ALLOW_UNTESTED = "OFFPOLICY_ALLOW_UNTESTED_VERL"
_MARK = "__verl_patch__"


class PatchError(RuntimeError):
    """A patch cannot be installed: its target, release or environment is not what it was written for."""


@dataclass(frozen=True)
class Contract:
    """The expectations of one patch.

    Attributes:
        name: short name of the patch, unique; shown in logs and by `verl_patches.status()`.
        target: "module:attribute.path" of the callable that is wrapped or the object that is extended.
        signature: parameters with defaults and without annotations, as `bare_signature` prints them, quoted
            from upstream's source; None where the target has none that Python can read.
        distribution: the installed distribution whose release decides, or "python".
        releases: version specifier of the releases that were tested, for instance "==0.9.1".
    """

    name: str
    target: str
    signature: str | None
    distribution: str
    releases: str

    def check(self) -> Any:
        """Returns the target after checking release and signature.

        Raises:
            PatchError: the release was not tested and this was not opted into, the target does not exist,
                or its signature differs.
        """
        self._check_release()
        found = resolve(self.target)
        if found is None:
            raise PatchError(self.moved("nothing of that name"))
        if self.signature is not None and bare_signature(found) != self.signature:
            raise PatchError(self.moved(bare_signature(found)))
        return found

    def _check_release(self) -> None:
        release = installed_release(self.distribution)
        if release is None:
            raise PatchError(
                f"patch {self.name!r} needs the distribution {self.distribution!r}, which is not installed. "
                f"Fix: install {self.distribution}{self.releases}."
            )
        if SpecifierSet(self.releases).contains(release, prereleases=True):
            return
        if os.environ.get(ALLOW_UNTESTED) == "1":
            logger.warning("patch %s: %s %s is untested", self.name, self.distribution, release)
            return
        raise PatchError(
            f"patch {self.name!r} was tested with {self.distribution}{self.releases}, found {release}. "
            f"Fix: install a tested release, or set {ALLOW_UNTESTED}=1 to try this one; the target's "
            f"signature is checked either way."
        )

    def moved(self, found: str) -> str:
        """The message for a target that is not what was expected: what, expected, found, mend."""
        return (
            f"patch {self.name!r}: the target {self.target} has moved. Expected "
            f"{self.signature or 'it to exist'}, found {found}. Fix: install {self.distribution}{self.releases}, or "
            f"read the new target and adapt the patch and its contract (see verl_patches/README.md)."
        )


def installed_release(distribution: str) -> str | None:
    """The installed version of a distribution without its local part, or None."""
    if distribution == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(distribution).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def resolve(target: str) -> Any:
    """The object that "module:attribute.path" names, or None if module or attribute does not exist."""
    module_name, _, path = target.partition(":")
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module_name))
    except (ImportError, AttributeError):
        return None


def bare_signature(function: Callable[..., Any]) -> str:
    """The signature without annotations, which upstream changes without changing the call.

    Wrappers are looked through, so a patched target still shows its own signature.
    """
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def wrap(contract: Contract, wrapper: Callable[..., Any]) -> bool:
    """Puts `wrapper(original, *args, **kwargs)` in front of the target, once.

    Returns:
        True if the target was wrapped now, False if this patch was in force already.
    """
    original = contract.check()
    if is_wrapped(original, contract.name):
        return False

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(patched, _MARK, contract.name)
    module_name, _, path = contract.target.partition(":")
    *owners, attribute = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module_name))
    setattr(owner, attribute, patched)
    logger.info("patch %s in force on %s", contract.name, contract.target)
    return True


def is_wrapped(function: Any, name: str) -> bool:
    """Whether the patch `name` is among the wrappers of `function`."""
    while function is not None:
        if getattr(function, "__dict__", {}).get(_MARK) == name:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
