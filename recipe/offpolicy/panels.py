"""Write the panels of an off-policy run for TensorBoard or Weights & Biases.

python -m recipe.offpolicy.panels --tensorboard LOGDIR     # then: tensorboard --logdir LOGDIR, tab CUSTOM SCALARS
python -m recipe.offpolicy.panels --wandb ENTITY/PROJECT   # saves a workspace there; needs a login
python -m recipe.offpolicy.panels --wandb ENTITY/PROJECT --out workspace.json   # only its definition, offline

Exit status: 0, or 2 if an argument is invalid.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .command_line import name_program, refuse, require_modules, run

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
    return ws.Workspace(entity=entity, project=project, name="Off-policy", sections=sections)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    require_modules("panels", "torch", "tensorboard" if options.tensorboard else "wandb_workspaces")
    try:
        if options.tensorboard:
            written = f"{write_layout(options.tensorboard)}: in TensorBoard, tab CUSTOM SCALARS"
        elif options.out:
            model = build_workspace(*options.wandb)._to_model()
            definition = model.model_dump_json(by_alias=True, exclude_none=True, indent=1)
            options.out.write_text(f"{definition}\n", encoding="utf-8")
            written = str(options.out)
        else:
            written = build_workspace(*options.wandb).save().url
    except OSError as error:
        return refuse("panels", error)
    print(written)  # noqa: T201
    return 0


def _read_project(text: str) -> list[str]:
    names = text.split("/")
    if len(names) != 2 or not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not ENTITY/PROJECT")
    return names


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog=name_program("panels"), description="Panels of a run for TensorBoard or Weights & Biases."
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--tensorboard", metavar="LOGDIR", type=Path, help="add a layout to this log directory")
    project = "save a workspace in this project"
    target.add_argument("--wandb", metavar="ENTITY/PROJECT", type=_read_project, help=project)
    parser.add_argument("--out", metavar="FILE", type=Path, help="with --wandb: write the workspace to a file, offline")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
