"""Routes in verl's real Megatron engine, observed where they are applied; sabotage is detected and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support import replaying_worker as rw
from tests.support.fresh_python import CPU
from tests.support.paths import ROOT

pytestmark = [pytest.mark.verl("==0.9.1"), pytest.mark.extended]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("megatron")
    rw.tiny_mixture(folder)
    script, out = ROOT / "tests" / "support" / "megatron_routes.py", folder / "found.json"
    result = subprocess.run(
        [sys.executable, str(script), str(folder), str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **CPU, "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize(("mode", "tokens"), [("R2", 40), ("R3", 36)])
def test_replayed_routes_are_seen_in_every_layer(found: Any, mode: str, tokens: int) -> None:
    """Four rows of ten tokens. The rollout engine never forwards a row's last token, and each forward pass is
    recomputed.
    """
    assert found[mode] == {"layers": [0, 1, 2], "tokens": tokens, "forwarded": 40, "placed": True}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "other layers",
            "for 36 of 36 tokens, the RouterReplay of layer 0 does not list the shipped experts",
        ),
        (
            "native",
            "the router of layer 0 did not send 36 of 36 tokens to the experts listed in its RouterReplay",
        ),
        ("other backward", "layer 0 was recomputed for its backward with other experts for 36 tokens"),
        # By verl alone this trains in silence: routes of the wrong tokens, and tokens that no expert sees.
        ("padded", "layer 0 forwarded 10 tokens, including padding, but has routes for 8"),
    ],
)
def test_what_goes_wrong_stops_the_update_by_name(found: Any, case: str, words: str) -> None:
    assert words in found[case]["error"]
