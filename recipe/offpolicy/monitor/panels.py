"""Dashboard panels, and their layouts for Weights & Biases and TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

NAME: Final = "Off-policy"
PANELS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "Five to watch": {
        "KL(mu, pi_old), nats per token": ("kl/k3",),
        "chi2 of pi / mu: watch it if pi_old is mu": ("full_ratio/chi2",),
        "Effective sample size: weights, pi / mu": ("weight/ess", "full_ratio/ess"),
        "Mean: weights, pi / mu": ("weight/mean", "full_ratio/mean"),
        "Kept share of tokens": ("keep/token_share",),
        "Non-finite tokens": tuple(
            f"nonfinite/{name}" for name in ("rollout_log_prob", "old_log_prob", "log_prob", "advantages")
        ),
    },
    "Liveness": {
        "Proved: correction, delivery of weights": ("live/proved", "delivery/proved"),
        "Tokens whose gradient was compared": ("live/gradient_tokens",),
        "Error of the gradient": ("live/gradient_error", "live/shift_error"),
    },
    "Mismatch": {
        "|log pi_old - log mu|": ("log_prob_difference/abs_mean",),
        "pi_old / mu": ("rollout_ratio/mean", "rollout_ratio/max"),
        "Effective sample size of pi_old / mu": ("rollout_ratio/ess",),
        "Perplexity": ("perplexity/rollout", "perplexity/old", "perplexity/current"),
        "KL by turn": ("turn/first/kl_k3", "turn/post_tool/kl_k3"),
    },
    "Staleness": {
        "Weight versions behind": ("staleness/mean", "staleness/max"),
        "KL by staleness": tuple(f"staleness/{age}/kl_k3" for age in ("is0", "is1", "is2", "ge3")),
        "Updates by which the engine lags": ("late_weights/lag",),
    },
    "Kept share": {
        "Sequences": ("keep/sequence_share",),
        "Tokens by sign of the advantage": ("keep/positive/token_share", "keep/negative/token_share"),
        "Sequences by length": tuple(
            f"length/{bucket}/keep_sequence_share" for bucket in ("le16", "le64", "le256", "le1024", "le4096", "gt4096")
        ),
        "Weights outside the bounds": ("weight/truncated_share",),
    },
}
"""Section -> title of a panel -> metrics under ``offpolicy/``."""


def write_layout(directory: Path) -> Path:
    """Write the layout of TensorBoard's tab CUSTOM SCALARS as a run under a log directory; return its folder."""
    from torch.utils.tensorboard import SummaryWriter

    def find(metrics: tuple[str, ...]) -> list[str]:
        return [f"^{re.escape(f'offpolicy/{metric}')}$" for metric in metrics]  # TensorBoard expects patterns

    folder = directory / "offpolicy_layout"
    for earlier in folder.glob("events.out.tfevents.*"):
        earlier.unlink()
    with SummaryWriter(str(folder)) as writer:
        writer.add_custom_scalars(
            {
                section: {title: ["Multiline", find(metrics)] for title, metrics in panels.items()}
                for section, panels in PANELS.items()
            }
        )
    return folder


def build_workspace(entity: str, project: str) -> Any:
    """Build the workspace of Weights & Biases, a ``wandb_workspaces.workspaces.Workspace``."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import LinePlot

    def plot(title: str, metrics: tuple[str, ...]) -> Any:
        return LinePlot(title=title, x="Step", y=[f"offpolicy/{metric}" for metric in metrics])

    sections = [
        ws.Section(name=section, is_open=place < 2, panels=[plot(*panel) for panel in panels.items()])
        for place, (section, panels) in enumerate(PANELS.items())
    ]
    return ws.Workspace(entity=entity, project=project, name=NAME, sections=sections)
