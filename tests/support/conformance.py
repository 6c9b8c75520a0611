"""Install and import other frameworks' own packages, and compare their losses with ours."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from recipe.offpolicy.correction import CorrectionSpec, SpecError, rollout_stage, step_stage
from recipe.offpolicy.correction.correction_parts import proximal_log_prob
from tests.support.paths import ROOT
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

REQUIREMENTS = ROOT / "tests/conformance/requirements"
ENVIRONMENTS = ROOT / "outputs/conformance"


def install(peer: str) -> Path:
    """Install the pinned packages of a framework, without dependencies, into a folder.

    The folder's name contains a hash of the pins, so equal pins share a folder. Other imports of these packages come
    from the environment that runs the tests.
    """
    pins = REQUIREMENTS / f"{peer}.txt"
    folder = ENVIRONMENTS / f"{peer}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    if not folder.exists():
        ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.mkdtemp(dir=ENVIRONMENTS)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]
        subprocess.run([*command, "--no-compile", "--target", unfinished, "-r", str(pins)], check=True, timeout=600)
        try:
            os.rename(unfinished, folder)
        except OSError:  # another process has finished first
            if not folder.exists():
                raise
            shutil.rmtree(unfinished)
    return folder


@contextmanager
def importable(folder: Path, *bare: str, absent: Collection[str] = ()) -> Iterator[None]:
    """Make the packages of a folder importable while they are imported.

    Args:
        bare: packages whose ``__init__`` is not executed, because it imports what a CPU environment lacks.
        absent: modules that are imported at the top of a file and not used by what is tested; empty while importing.
    """
    before = set(sys.modules)
    sys.path.append(str(folder))
    for name in bare:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder.joinpath(*name.split(".")))]
    for name in absent:
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(absent) - before:
            del sys.modules[name]


def load(folder: Path, name: str, *bare: str, absent: Collection[str] = ()) -> Any:
    """Import one module of a framework, see ``importable``."""
    with importable(folder, *bare, absent=absent):
        return importlib.import_module(name)


def excerpt(path: Path, *names: str, **given: Any) -> dict[str, Any]:
    """Execute definitions of a file that cannot be imported here, without its imports of other packages.

    Args:
        names: functions and classes at the top, or methods as ``Class.method``; the standard library's and torch's
            imports of the file are executed first.
        given: values of other names that they use.

    Returns:
        The namespace, with each definition by its last name.
    """
    module = ast.parse(path.read_text(encoding="utf-8"))
    chosen: list[ast.stmt] = []
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            roots = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            if all(root.partition(".")[0] in (*sys.stdlib_module_names, "torch") for root in roots):
                chosen.append(node)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = [each for each in node.body if f"{node.name}.{getattr(each, 'name', '')}" in names]
            chosen += [node] if node.name in names else inside
    found = {getattr(node, "name", "") for node in chosen}
    if missing := {name.rpartition(".")[2] for name in names} - found:
        raise LookupError(f"{path.name} does not define {', '.join(sorted(missing))} any more.")
    namespace: dict[str, Any] = {"__name__": f"excerpt_{path.stem}"} | given
    sys.modules[namespace["__name__"]] = ModuleType(namespace["__name__"])  # dataclasses look it up
    exec(compile(ast.Module(chosen, []), str(path), "exec"), namespace)
    return namespace


@dataclasses.dataclass(frozen=True)
class Rows:
    """Log-probs of three policies and of a reference, (B, T) float64; response mask; advantages of either sign."""

    mu: Tensor
    old: Tensor
    pi: Tensor
    ref: Tensor
    mask: Tensor
    advantages: Tensor

    @property
    def tokens(self) -> Tensor:
        return self.mask.sum()


def draw_rows(seed: int, rows: int = 6, tokens: int = 7) -> Rows:
    """Draw rows with padding on the right, one tool token, and one advantage per row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: float, *shape: int) -> Tensor:
        return size * torch.randn(*(shape or (rows, tokens)), generator=generator, dtype=torch.float64)

    width = (0.02, 0.2, 0.7)[seed % 3]  # near, usual and far
    mu = -0.05 - normal(1.5).abs()
    old = (mu + normal(width)).clamp(max=-1e-3)
    pi = (old + normal(width)).clamp(max=-1e-3)
    ref = pi + normal(0.3)  # near pi: verl clamps the estimate of a greater KL
    lengths = torch.randint(2, tokens + 1, (rows, 1), generator=generator)
    mask = torch.arange(tokens) < lengths
    mask[0, 1] = False
    advantages = normal(1.0, rows, 1).expand(rows, tokens).contiguous()
    return Rows(mu, old, pi, ref, mask, advantages)


Loss = Callable[[Tensor], Tensor]
"""A scalar loss of log pi."""


def measure(loss: Loss, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient at log pi, 0 where the mask is False."""
    pi = rows.pi.clone().requires_grad_()
    value = loss(pi)
    (gradient,) = torch.autograd.grad(value, pi)
    return value.detach().double(), gradient.double() * rows.mask


def actor(**changes: Any) -> FSDPActorConfig:
    """verl's configuration of a loss, by default PPO's clip at 0.2 without dual clip."""
    values: dict[str, Any] = dict(
        strategy="fsdp2", ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=2, rollout_n=1, use_torch_compile=False
    )
    return FSDPActorConfig(**(values | {"clip_ratio_c": 1e30} | changes))


def decide(spec: CorrectionSpec, rows: Rows, *, old: Tensor | None = None) -> Tensor:
    """Compute weight * keep of each token."""
    old = choose_old(spec, rows) if old is None else old
    stage = rollout_stage(spec, old_log_prob=old, rollout_log_prob=rows.mu, response_mask=rows.mask)
    step = step_stage(spec, stage, log_prob=rows.pi, advantages=rows.advantages)
    return step.weight * step.keep


def choose_old(spec: CorrectionSpec, rows: Rows, ages: Tensor | None = None) -> Tensor:
    """Choose log pi_old according to the correction's ``proximal``."""
    return proximal_log_prob(
        spec.proximal, spec.alpha, old_log_prob=rows.old, rollout_log_prob=rows.mu, log_prob=rows.pi, ages=ages
    )


def our_loss(
    spec: CorrectionSpec,
    rows: Rows,
    *,
    mode: str = "vanilla",
    aggregation: str = "token-mean",
    old: Tensor | None = None,
    **changes: Any,
) -> Loss:
    """Build verl's own policy loss with the weights of a correction."""
    old = choose_old(spec, rows) if old is None else old
    weights = decide(spec, rows, old=old)

    def compute(pi: Tensor) -> Tensor:
        value, _ = get_policy_loss_fn(mode)(
            old_log_prob=old,
            log_prob=pi,
            advantages=rows.advantages,
            response_mask=rows.mask,
            loss_agg_mode=aggregation,
            config=actor(**changes),
            rollout_is_weights=weights,
        )
        return value

    return compute


Options = dict[str, Any]


def draw_options(grid: Mapping[str, Sequence[Any]], draw: random.Random) -> Options:
    """Draw about half of the keys, each with one of its values."""
    return {key: draw.choice(values) for key, values in grid.items() if draw.random() < 0.5}


def compare(
    peer: str,
    grid: Mapping[str, Sequence[Any]],
    theirs: Callable[[Options, Rows], Loss],
    ours: Callable[[CorrectionSpec, Options, Rows], Loss],
    *,
    draws: int = 400,
    always: Options | None = None,
    gradient_alone: Callable[[Options], bool] = lambda options: False,
) -> None:
    """Compare loss and gradient over random options; every value of the grid must occur in a translated draw.

    Args:
        grid: key of the framework -> its values.
        theirs, ours: the loss of log pi under the options, by their function and by ours; a ``ValueError`` from
            theirs is the framework's own refusal.
        always: options of every draw.
        gradient_alone: options under which both losses have the same gradient and other values.
    """
    draw, seen = random.Random(peer), set()
    for seed in range(draws):
        options = (always or {}) | draw_options(grid, draw)
        try:
            spec = CorrectionSpec.from_peer(peer, options)
        except SpecError:
            continue
        rows = draw_rows(seed)
        try:
            loss = theirs(options, rows)
        except ValueError:  # refused by the framework itself
            continue
        expected, found = measure(loss, rows), measure(ours(spec, options, rows), rows)
        for name, left, right in zip(("loss", "gradient"), expected, found, strict=True):
            if name == "loss" and gradient_alone(options):
                continue
            message = f"{name} of {peer} with {options}, rows of seed {seed}: theirs {left}, ours {right}"
            assert torch.allclose(left, right, rtol=1e-6, atol=1e-6), message
        seen |= {(key, repr(value)) for key, value in options.items()}
    never = {(key, repr(value)) for key, values in grid.items() for value in values} - seen
    assert not never, f"{peer}: never translated in {draws} draws: {sorted(never)}"
