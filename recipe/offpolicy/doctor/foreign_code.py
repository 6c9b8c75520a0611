"""Protection against the checked script: code in its folder, or code that it names, is not imported or executed."""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
_OURS = ("recipe", "verl_patches", "hydra_plugins")
_INSTALLED = (sys.prefix, sys.base_prefix, *(os.path.join(_ROOT, name) for name in _OURS))
_PLUGINS = "VERL_USE_EXTERNAL_MODULES"
_refused: list[str] = []
"""Folders from which code is rejected."""
_hooked: list[bool] = []


def set_paths_aside(folder: str = "") -> None:
    """Remove the current directory, and PYTHONPATH's entries in ``folder``, from ``sys.path``.

    Paths added by site-packages, such as an editable installation, stay, because the user installed them.
    """
    library = next((place for place, entry in enumerate(sys.path) if entry.endswith(".zip")), 0)
    for entry in sys.path[:library]:
        path = os.path.realpath(entry or os.curdir)
        if path != _ROOT and (path == os.path.realpath(os.curdir) or (folder and _is_within(path, folder))):
            sys.path.remove(entry)


class ForeignCode:
    """A context in which code from a script's folder, or from a model, is rejected with an ImportError.

    Args:
        script: path of the script that is checked.
    """

    def __init__(self, script: str) -> None:
        self._folder = os.path.realpath(os.path.dirname(os.path.abspath(script)))

    def __enter__(self) -> None:
        self._path, self._plugins = list(sys.path), os.environ.pop(_PLUGINS, None)
        set_paths_aside(self._folder)
        models = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
        _refused[:] = [self._folder, os.path.realpath(os.environ.get("HF_MODULES_CACHE", f"{models}/modules"))]
        # An audit hook catches every way of executing a file, and cannot be removed.
        if not _hooked:
            sys.addaudithook(_refuse)
            _hooked.append(True)

    def __exit__(self, *raised: object) -> None:
        _refused.clear()
        sys.path[:] = self._path
        if self._plugins is not None:
            os.environ[_PLUGINS] = self._plugins


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _refused or event not in ("exec", "import"):
        return
    given = arguments[0 if event == "exec" else 1]
    file = given.co_filename if isinstance(given, CodeType) else given
    if isinstance(file, str) and not file.startswith("<") and _is_foreign(file):
        raise ImportError(f"{file} is code in the script's folder; the doctor does not execute such code")


def _is_foreign(file: str) -> bool:
    verl = getattr(sys.modules.get("verl"), "__file__", None)
    installed = [*_INSTALLED, *([os.path.dirname(verl)] if verl else [])]
    return any(
        _is_within(path, folder) and not any(_is_within(path, root) for root in installed)
        for path in (os.path.abspath(file), os.path.realpath(file))
        for folder in _refused
    )


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
