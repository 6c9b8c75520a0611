"""Fixtures of the tests of the evidence on collapse."""

from __future__ import annotations

import sys

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))
