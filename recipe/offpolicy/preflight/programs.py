"""The launched program: this package's, one of verl's, or a user's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .python_source import find_source

if TYPE_CHECKING:
    from ..correction.problem import Problem

OURS = "recipe.offpolicy.main_offpolicy"
VERLS = (
    "verl.trainer.main_ppo",
    "verl.experimental.fully_async_policy.fully_async_main",
    "verl.experimental.one_step_off_policy.main_ppo",
)
"""verl's programs whose trainers and workers the checks support."""
SAMPLERS = ("verl.trainer.main_eval", "verl.trainer.main_generation", "verl.trainer.main_generation_server")
"""verl's programs that train nothing but have a configuration like PPO's."""


def find_launched() -> str:
    """Find this process's program, as ``python -m`` names it; its file if it is not verl's."""
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
    """Refuse verl's programs that only sample or evaluate."""
    from ..correction.problem import Problem  # imported late: it imports torch

    if module in SAMPLERS:
        reason = "it trains nothing, so there is no gradient to correct."
        yield Problem("module", module, reason, "Launch it without a correction.", parts=())
