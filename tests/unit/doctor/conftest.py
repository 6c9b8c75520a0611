"""What every test of the doctor has."""

from __future__ import annotations

import pytest

from recipe.offpolicy.doctor.bash import programs


@pytest.fixture(autouse=True)
def programs_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script's programs answer is known on a busy machine too, which may take them long."""
    monkeypatch.setattr(programs, "_SECONDS", 300)
