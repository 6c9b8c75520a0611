"""Panels for TensorBoard and Weights & Biases: they show metrics that a run logs, in files that both programs read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch  # noqa: F401  # before TensorBoard, which would look for TensorFlow

from recipe.offpolicy.panels import PANELS, main
from tests.support.statistics_page import ENTRIES

METRICS = [metric for panels in PANELS.values() for metrics in panels.values() for metric in metrics]
OF_A_RUN = {"delivery/proved", "late_weights/lag"} | {
    f"live/{name}" for name in ("proved", "gradient_tokens", "gradient_error", "shift_error")
}


def test_every_metric_is_logged_by_a_run() -> None:
    known = {key for entry in ENTRIES for key, _ in entry.expand()} | OF_A_RUN
    assert set(METRICS) <= known
    assert len(METRICS) == len(set(METRICS))


def test_tensorboard_finds_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    for _ in range(2):  # the second replaces the first
        assert main(["--tensorboard", str(tmp_path)]) == 0
    assert str(tmp_path / "offpolicy_layout") in capsys.readouterr().out
    assert len(list((tmp_path / "offpolicy_layout").iterdir())) == 1
    events = EventAccumulator(str(tmp_path / "offpolicy_layout"))
    events.Reload()
    (tensor,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(tensor.tensor_proto.string_val[0])
    found = {
        category.title: {chart.title: list(chart.multiline.tag) for chart in category.chart}
        for category in layout.category
    }
    assert {section: list(charts) for section, charts in found.items()} == {
        section: list(panels) for section, panels in PANELS.items()
    }
    (pattern,) = found["Five to watch"]["KL(mu, pi_old), nats per token"]
    assert re.match(pattern, "offpolicy/kl/k3")
    assert not re.match(pattern, "offpolicy/kl/k31")
