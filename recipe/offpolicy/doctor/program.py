"""The program of a launch and its ``@hydra.main``, read without importing the program.

Imports neither verl nor torch, so that errors in the text of a script are reported at once.
"""

from __future__ import annotations

import argparse
import ast
import shlex
from dataclasses import dataclass
from pathlib import Path

from verl_patches.contract import demand_release, location
from verl_patches.releases import RELEASES, TESTED, release_of

from ..preflight.python_source import OURS, VERLS, find_source

_OF_MAIN = ("config_path", "config_name")
_VERL_RECIPE = (
    "It belongs to verl-recipe, which verl does not install: clone https://github.com/verl-project/verl-recipe as "
    "DIR/recipe, and launch from DIR or put DIR on PYTHONPATH. In a checkout of verl: git submodule update --init "
    "recipe, and DIR is the checkout."
)


class LaunchError(ValueError):
    """The configuration of a launch cannot be composed; the message says why, and names the key if there is one."""


@dataclass(frozen=True)
class Launch:
    """A program with its arguments.

    Attributes:
        module: the program, as ``python -m`` names it.
        arguments: flags of Hydra, and overrides.
        origin: script and line from which the launch was read; "" for the command line.
        lost: arguments that were given to the script but that the script does not pass on.
        assumed: assumptions made while reading the script, as sentences without the full stop.
    """

    module: str
    arguments: tuple[str, ...]
    origin: str = ""
    lost: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        """True for this recipe's own program."""
        return self.module == OURS

    @property
    def overrides(self) -> tuple[str, ...]:
        """The arguments that are overrides, not flags."""
        return tuple(argument for argument in self.arguments if not argument.startswith("-"))

    def explain_lost(self) -> tuple[str, str]:
        """Explain that the script does not pass on ``lost``, and how to fix this."""
        lost = shlex.join(self.lost)
        reason = f"{self.origin}: the script does not pass on {lost}; the checks assume that it does."
        return reason, f'End the launch with "$@", or add {lost} to it.'


@dataclass(frozen=True)
class HydraMain:
    """The arguments of a program's ``@hydra.main`` (None for missing arguments), and the program's file.

    Attributes:
        computed: names of the arguments whose values the program computes, so that they are unknown unless it runs.
    """

    file: Path
    config_path: str | None
    config_name: str | None
    computed: tuple[str, ...] = ()

    def demand(self, flags: argparse.Namespace) -> None:
        """Reject a computed argument if no Hydra flag replaces it.

        Raises:
            LaunchError: an argument is computed; the message names the flags.
        """
        if any(not getattr(flags, name) for name in self.computed):
            what = " and ".join(self.computed)
            given = " ".join(f"--{name.replace('_', '-')} VALUE" for name in self.computed)
            raise LaunchError(
                f"{self.file}: its @hydra.main computes {what}, which is unknown until the program runs. "
                f"Fix: append {given} to the launch."
            )


def read_hydra_main(path: Path) -> HydraMain | None:
    """Read the arguments of a program's ``@hydra.main`` without running it; None if it has none."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    names, values = {"hydra.main"}, dict[str, ast.Constant]()
    for node in tree.body:
        match node:
            case ast.ImportFrom(module="hydra"):
                names |= {each.asname or each.name for each in node.names if each.name == "main"}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value):
                values[name] = value
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in names:
            given: dict[str | None, ast.expr] = dict(zip(_OF_MAIN, call.args, strict=False))
            given |= {keyword.arg: keyword.value for keyword in call.keywords}
            found = [given.get(name, ast.Constant(None)) for name in _OF_MAIN]
            found = [values.get(each.id, each) if isinstance(each, ast.Name) else each for each in found]
            computed = tuple(n for n, v in zip(_OF_MAIN, found, strict=True) if not isinstance(v, ast.Constant))
            config_path, config_name = (
                None if n in computed else ast.literal_eval(v) for n, v in zip(_OF_MAIN, found, strict=True)
            )
            return HydraMain(path, config_path, config_name, computed)
    return None


def find_program(module: str) -> HydraMain:
    """Find a program by its dotted name.

    Raises:
        PatchError: verl is missing, or its release is not supported.
        LaunchError: the program does not exist, or takes no overrides.
    """
    _refuse_another_verl(demand_release())
    path = find_source(module)
    if path is None:
        raise LaunchError(f"{module}: this program was not found. {_locate(module)}")
    found = read_hydra_main(path)
    if found is None:
        raise LaunchError(f"{module}: {path} has no @hydra.main, so it takes no overrides.")
    return found


def _refuse_another_verl(release: str) -> None:
    """Reject a launch from a folder that contains another release of verl, because Python would import that release."""
    file, installed = find_source("verl"), location("verl")
    if file is None or installed is None or file.parent.resolve() == installed.resolve():
        return
    version = file.parent / "version" / "version"
    other = release_of(version.read_text()) if version.is_file() else release
    if other != release:
        raise LaunchError(
            f"{file.parent} contains verl {other}, which a launch from here would import instead of verl {release} in "
            f"{installed}. Supported: {', '.join(TESTED)}. Fix: launch from a folder without verl."
        )


def _locate(module: str) -> str:
    """Suggest the location of a program that was not found."""
    top, _, below = module.partition(".")
    if top == "recipe" and find_source(moved := f"verl.experimental.{below}") is not None:
        return f"verl has moved this program: launch {moved}."
    if top in ("recipe", "verl_recipe"):
        return _VERL_RECIPE
    if module in VERLS:
        first = next(release.name for release in RELEASES if release.separate_programs)
        return f"The installed verl has no such program. Install verl {first} or later."
    return "Correct its name, install it, or change to the launch directory."
