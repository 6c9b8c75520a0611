"""Script that lists the configuration keys of other frameworks from their source trees, into tests/data/peer_keys.yaml.

    python -m tests.support.peer_keys trl 1.16.0 /path/to/unpacked/trl >> tests/data/peer_keys.yaml

A tree is an unpacked wheel or a checkout; it is parsed, never imported. Only names are kept: all fields of the classes
that configure loss and correction, by the path of their section, and of everything else the names that look like a
correction's.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from recipe.offpolicy.correction.dialects.peer import names_a_correction

Section = tuple[str, str, str]
"""Path of the section, file (the end of its path), and class, or the beginning of the options' names on the command
line."""

SECTIONS: Final[dict[str, tuple[Section, ...]]] = {
    "areal": (
        ("actor", "api/cli_args.py", "PPOActorConfig"),
        ("actor.rejection_sampling", "api/cli_args.py", "RejectionSamplingConfig"),
    ),
    "miles": (),
    "ms_swift": (),
    "nemo_rl": (("loss_fn", "loss_functions.py", "ClippedPGLossConfig"), ("grpo", "algorithms/grpo.py", "GRPOConfig")),
    "open_instruct": (("", "open_instruct/grpo_utils.py", "GRPOExperimentConfig"),),
    "openrlhf": (("", "cli/train_ppo_ray.py", "--algo.advantage."), ("", "cli/train_ppo_ray.py", "--algo.kl.")),
    "prime_rl": tuple(
        ("trainer.loss", "configs/trainer.py", name)
        for name in ("DefaultLossConfig", "IPOLossConfig", "CustomLossConfig")
    ),
    "roll": (
        ("train_infer_correction", "configs/base_config.py", "TrainInferCorrectionConfig"),
        ("train_infer_correction.is_weight", "configs/base_config.py", "TrainInferISWeightConfig"),
        ("train_infer_correction.filters", "configs/base_config.py", "TrainInferFilterConfig"),
    ),
    "skyrl": (
        ("trainer.algorithm", "train/config/config.py", "AlgorithmConfig"),
        ("trainer.algorithm.off_policy_correction", "train/config/config.py", "OffPolicyCorrectionConfig"),
        ("trainer.algorithm.cispo", "train/config/config.py", "CISPOConfig"),
        ("trainer.algorithm.dppo", "train/config/config.py", "DPPOConfig"),
    ),
    "slime": (),
    "trl": (("", "trainer/grpo_config.py", "GRPOConfig"),),
    "verl": (("algorithm.rollout_correction", "trainer/config/algorithm.py", "RolloutCorrectionConfig"),),
}
ELSEWHERE: Final = {
    "areal": ("api/cli_args.py",),
    "miles": ("miles/utils/arguments.py", "train_infer_mismatch_helper/mis.yaml"),
    "ms_swift": ("rlhf_trainers/args_mixin.py", "arguments/rlhf_args.py"),
    "nemo_rl": ("nemo_rl/algorithms/grpo.py", "nemo_rl/models/policy/__init__.py"),
    "open_instruct": ("open_instruct/data_loader.py", "open_instruct/grpo_fast.py", "open_instruct/grpo_utils.py"),
    "openrlhf": ("cli/train_ppo_ray.py",),
    "prime_rl": ("configs/*.py",),
    "roll": ("configs/*.py", "rlvr/rlvr_config.py", "agentic/agentic_config.py"),
    "skyrl": ("train/config/config.py",),
    "slime": ("slime/utils/arguments.py", "train_infer_mismatch_helper/mis.yaml"),
    "trl": (),
    "verl": ("trainer/config/*.yaml",),
}


def parse(root: Path, pattern: str) -> Iterator[ast.Module]:
    """Parse the Python files of ``root`` whose path ends with ``pattern``."""
    for path in sorted(root.rglob(f"**/{pattern}")):
        if path.suffix == ".py" and "tests" not in path.parts:
            # Type parameters, as of Python 3.12, name no key.
            yield ast.parse(re.sub(r"^(\s*(?:def|class) \w+)\[\w+\]", r"\1", path.read_text(), flags=re.MULTILINE))


def list_fields(module: ast.Module, name: str) -> list[str]:
    """List the annotated fields of a class and of its bases in the same module."""
    classes = {node.name: node for node in ast.walk(module) if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return []
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    inherited = [field for base in bases for field in list_fields(module, base)]
    return inherited + _own_fields(classes[name])


def _own_fields(node: ast.ClassDef) -> list[str]:
    found = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return [each.target.id for each in found if "ClassVar" not in ast.unparse(each.annotation)]  # type: ignore[union-attr]


def list_options(module: ast.Module) -> list[str]:
    """List the options of the command line that a module adds, without leading dashes and with underscores."""
    found = []
    for node in ast.walk(module):
        for argument in node.args if isinstance(node, ast.Call) else ():
            if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                found.append(str(argument.value).removeprefix("--").replace("-", "_"))
    return [name for name in found if re.fullmatch(r"[\w.]+", name)]


def list_elsewhere(root: Path, pattern: str) -> Iterator[str]:
    """List every name of the files of ``root`` whose path ends with ``pattern``."""
    for module in parse(root, pattern):
        yield from list_options(module)
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                yield from _own_fields(node)
    for path in root.rglob(f"**/{pattern}") if pattern.endswith(".yaml") else ():
        yield from _list_keys(yaml.safe_load(path.read_text()))


def _list_keys(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield str(key)
            yield from _list_keys(value)


def read_tree(peer: str, root: Path) -> dict[str, str]:
    """Read the names of one framework: path of the section -> names, and ``elsewhere``."""
    found: dict[str, set[str]] = {}
    for section, pattern, owner in SECTIONS[peer]:
        for module in parse(root, pattern):
            if owner.startswith("--"):
                names = [name for name in list_options(module) if f"--{name}".startswith(owner)]
            else:
                names = list_fields(module, owner)
            found.setdefault(section, set()).update(names)
    elsewhere = {name for pattern in ELSEWHERE[peer] for name in list_elsewhere(root, pattern)}
    known = set().union(*found.values()) if found else set()
    found["elsewhere"] = {name for name in elsewhere if names_a_correction(name)} - known
    return {section or "options": " ".join(sorted(names)) for section, names in found.items() if names}


if __name__ == "__main__":
    name, release, tree = sys.argv[1:]
    print(yaml.safe_dump({f"{name} {release}": read_tree(name, Path(tree))}, width=118, sort_keys=True), end="")
