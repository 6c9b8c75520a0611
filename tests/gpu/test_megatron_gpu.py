"""The part of Megatron that needs a GPU: Transformer Engine's layers on packed sequences, in bfloat16, on one
device.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import megatron_program as mp
from tests.support.parity_case import Case

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.verl("==0.9.1")]


def test_transformer_engine_makes_the_update_of_the_reference(tmp_path: Path) -> None:
    pytest.importorskip("transformer_engine")
    pytest.importorskip("flash_attn")
    folder = mp.deep_model(tmp_path / "model")
    job, proved = mp.of_job("tis"), mp.of_job("proved")
    layout = mp.Layout(dtype="bfloat16", transformer_engine=True)
    found = mp.run(mp.ENGINE, folder, tmp_path, {"packed": (layout, [job, proved])})
    (rank,) = found["packed"]
    assert (rank.seen[job.name].error, rank.seen[proved.name].error) == ("", "")
    case = Case.of(folder)
    ((update, _),) = mp.updates([rank], job)
    mp.assert_same_in_bf16(update, case, job)
    assert mp.judged(rank.seen[proved.name].packets, proved, case)["proved"] == 1.0
