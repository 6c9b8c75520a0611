"""The imports of a launch's check: verl's own code runs, but little of what verl needs for training."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.offpolicy.process_start import CHECK_FLAG
from tests.support.applications import NEEDED
from tests.support.examples import each_nth_by_default
from tests.support.fresh_python import python
from tests.support.paths import ROOT

pytest.importorskip("verl")

pytestmark = pytest.mark.slow

TRAINS_ONLY = {"ray", "transformers", "datasets", "pandas", "torch._dynamo", "sympy", "vllm", "megatron", "numba"}
"""Packages that verl imports, but that no check uses."""
# The program as `python -m` runs it; where it ends, which of these it has imported.
WATCHED = f"""
import atexit, os, runpy, sys
ended = os._exit
def tell(status=0):
    print("imported:", *sorted({TRAINS_ONLY!r} & sys.modules.keys()), "verl" * ("verl" in sys.modules), file=sys.stderr)
    sys.stderr.flush()
    ended(status)
os._exit = tell
atexit.register(tell)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
DOCTOR = "recipe.offpolicy.doctor"


@pytest.mark.parametrize(
    ("program", "said"),
    each_nth_by_default(
        3,
        [
            ((DOCTOR, "correction=[tis_token,gsm]", *NEEDED), "OK: every check passes"),
            ((DOCTOR, "--script", str(ROOT / "recipe/offpolicy/run_dense_fsdp.sh")), "OK: every check passes"),
            (("recipe.offpolicy.main_offpolicy", CHECK_FLAG, "correction=gsm", *NEEDED), "all checks passed"),
        ],
    ),
)
def test_a_check_imports_nothing_that_only_training_uses(
    program: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = python(f"import sys; sys.argv = ['', *{program!r}]\n{WATCHED}", bare=True)
    assert said in done.stdout, done.stderr[-2000:]
    (imported,) = (line.split()[1:] for line in done.stderr.splitlines() if line.startswith("imported: "))
    assert imported == ["verl"]
