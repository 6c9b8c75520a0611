"""OpenRLHF's own policy loss and arguments."""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec
from recipe.offpolicy.correction.dialects import PEERS
from tests.support.conformance import Loss, Options, Rows, check_fields, compare, install, load, our_loss

pytestmark = pytest.mark.extended

IS, LOSS = "algo.advantage.is_correction_", "actor.policy_loss_type"
GRID: dict[str, list[Any]] = {
    f"{IS}level": ["off", "token", "seq"],
    f"{IS}mode": ["mask", "clip"],
    f"{IS}gating": ["ratio", "binary_kl", "tv"],
    f"{IS}threshold": [[0.5, 5.0], [0.8, 1.2], [0.0, 1.1], [0.0, 0.05], [0.0, 0.003]],
    LOSS: ["ppo", "gspo"],
}
OLDER = {
    *(f"{IS}{name}" for name in ("enable", "type")),
    *("enable_vllm_is_correction", "vllm_is_correction_type", "vllm_is_truncated_threshold", "policy_loss_type"),
}
NO_CORRECTION = {
    *(f"actor.{name}" for name in ("aux_loss_coef", "dual_clip", "entropy_coef", "eps_clip", "eps_clip_low_high")),
    *("actor.freeze_visual_encoder", "actor.loss_agg_mode"),
    *("algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"),
}
OTHER = (
    *("ckpt", "critic", "data", "ds", "eval", "logger", "ref", "reward", "rollout", "train", "vllm"),
    *("local_rank", "use_ms"),
    *(f"actor.{name}" for name in ("adam", "muon", "num_nodes", "num_gpus_per_node", "optim", "lr_scheduler")),
    *(f"actor.{name}" for name in ("lr_warmup_ratio", "min_lr_ratio", "max_norm", "model_name_or_path")),
    *(f"actor.gradient_checkpointing_{name}" for name in ("enable", "reentrant")),
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return install("openrlhf")


@pytest.fixture(scope="module")
def policy_loss(folder: Path) -> Any:
    """Its module of losses; the utilities next to it import deepspeed, which the loss does not use."""
    return load(folder, "openrlhf.models.loss", "openrlhf", "openrlhf.models", absent={"deepspeed"}).PolicyLoss


def theirs(policy_loss: Any, options: Options, rows: Rows) -> Loss:
    values = {name.rpartition(".")[2]: value for name, value in options.items()}
    loss = policy_loss(**values)

    def compute(pi: Tensor) -> Tensor:
        return loss(pi, rows.old, rows.advantages, rows.mask.double(), rows.mu)[0]

    return compute


def ours(spec: CorrectionSpec, options: Options, rows: Rows) -> Loss:
    if options.get(LOSS) == "gspo":
        return our_loss(spec, rows, mode="gspo", aggregation="seq-mean-token-mean", clip_ratio=0.2)
    return our_loss(spec, rows)


def test_policy_loss(policy_loss: Any) -> None:
    compare("openrlhf", GRID, functools.partial(theirs, policy_loss), ours, draws=600)


class _Parsed(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


class _Parser(argparse.ArgumentParser):
    def parse_args(self, *arguments: Any, **more: Any) -> Any:
        raise _Parsed(self)


def list_arguments(script: Path) -> dict[str, Any]:
    """Execute the script's main block, without its imports, until it parses: name of each argument -> default."""
    module = ast.parse(script.read_text(encoding="utf-8"))
    main = next(node for node in module.body if isinstance(node, ast.If))
    names = {"argparse": SimpleNamespace(ArgumentParser=_Parser), "datetime": datetime.datetime}
    with pytest.raises(_Parsed) as caught:
        exec(compile(ast.Module(main.body, []), str(script), "exec"), names)
    return {action.dest: action.default for action in caught.value.parser._actions if action.dest != "help"}


def test_every_argument_is_known(folder: Path) -> None:
    check_fields(
        PEERS["openrlhf"],
        list_arguments(folder / "openrlhf/cli/train_ppo_ray.py"),
        compared=GRID,
        not_compared={"algo.kl.unbiased_gradient": "refused with a KL loss: another gradient"},
        no_correction=NO_CORRECTION,
        other_sections=OTHER,
        older=OLDER,
    )
