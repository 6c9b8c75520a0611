"""Write the panels of an off-policy run for TensorBoard or Weights & Biases.

python -m recipe.offpolicy.panels --tensorboard LOGDIR     # then: tensorboard --logdir LOGDIR, tab CUSTOM SCALARS
python -m recipe.offpolicy.panels --wandb ENTITY/PROJECT   # saves a workspace there; needs a login
python -m recipe.offpolicy.panels --wandb ENTITY/PROJECT --out workspace.json   # only its definition, offline

Exit status: 0, or 2 if an argument is invalid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .command_line import BAD_INPUT, name_program, require_modules, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = build_parser().parse_args(arguments)
    require_modules("panels", "torch", "tensorboard" if options.tensorboard else "wandb_workspaces")
    from .monitor.panels import build_workspace, write_layout

    try:
        if options.tensorboard:
            written = f"{write_layout(options.tensorboard)}: in TensorBoard, tab CUSTOM SCALARS"
        else:
            workspace = build_workspace(*options.wandb)
            if options.out:
                definition = workspace._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=1)
                options.out.write_text(f"{definition}\n", encoding="utf-8")
                written = str(options.out)
            else:
                written = workspace.save().url
    except OSError as error:
        print(f"panels: {error}", file=sys.stderr)  # noqa: T201
        return BAD_INPUT
    print(written)  # noqa: T201
    return 0


def _read_project(text: str) -> list[str]:
    entity, _, project = text.partition("/")
    if not entity or not project or "/" in project:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENTITY/PROJECT")
    return [entity, project]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog=name_program("panels"), description="Panels of a run for TensorBoard or Weights & Biases."
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--tensorboard", metavar="LOGDIR", type=Path, help="add a layout to this log directory")
    target.add_argument(
        "--wandb", metavar="ENTITY/PROJECT", type=_read_project, help="save a workspace in this project"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="with --wandb: write its definition, offline")
    return parser


if __name__ == "__main__":
    sys.exit(run("panels", main))
