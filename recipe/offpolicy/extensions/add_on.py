"""Base classes of add-ons and extensions, and the table that maps configuration sections to extensions.

``AddOns`` calls the hooks in the order in which they are defined here. If a hook receives a function, the hook wraps a
method of verl's trainer, and the function runs that method. The first add-on is the outermost wrapper.

A step calls ``next_batch`` and ``on_rollout``; then, around verl's estimator, ``shape_rewards``, ``estimate``,
``shape_advantages`` and ``on_advantages``; then, in the workers, ``wrap_loss`` and ``report``; and finally ``judge``
with the workers' reports.

A section is enabled if it is a mapping, even an empty one (``{}``), and disabled if it is null or absent.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from ..batch.declared_keys import Configured
from ..correction import Problem, SpecError
from ..correction.problem import CheckError
from ..fault_tolerance.state_schema import CheckpointError, read_json, refuse

if TYPE_CHECKING:
    from .batch_view import BatchView, LossRows, PromptView


@dataclass(frozen=True)
class Advantages:
    """The advantages of one batch, each (n, T).

    Attributes:
        rewards: input of verl's estimator.
        own: the estimator's result.
        final: advantages sent to the workers.
    """

    rewards: Tensor
    own: Tensor
    final: Tensor


class AddOn:
    """Base class of add-ons; by default, each hook does nothing."""

    proof_name: ClassVar[str] = ""
    """Name under which ``unproved`` is reported; if empty, the extension's section is used."""
    phase: ClassVar[str] = ""
    """Watchdog phase to which the hooks' time is charged. If empty, the time of an extension is charged to a phase
    named after its section, and the time of any other add-on to verl's own phase."""

    # Start and end ------------------------------------------------------------------------------------------

    def replay_buffer(self, build: Callable[[], Any]) -> Any:
        """Build the V1 trainer's replay buffer."""
        return build()

    def begin(self, config: DictConfig) -> None:
        """Start the add-on in the trainer's process, at the beginning of the run."""

    def actor_class(self, worker: type) -> type:
        """Choose the class of the actor's workers, given verl's class or the class that the next add-on chose."""
        return worker

    def engine_part(self) -> Callable[[Any], object] | None:
        """Return a function that each of verl's actor workers calls once its model exists; None if there is none."""
        return None

    def rollout_client(self, client: Any) -> Any:
        """Return the rollout client for agent loops, given verl's client or the client of another add-on."""
        return client

    def load_prompts(self, loader: Any) -> Any:
        """Return the data loader of training prompts: verl's own loader, before its first batch, or a replacement."""
        return loader

    def on_resumed(self) -> None:
        """Prepare for training after verl has loaded a checkpoint, or has found none."""

    def end(self) -> None:
        """Release resources, such as threads; also called after a failure."""

    # A step -------------------------------------------------------------------------------------------------

    def run_step(self, run: Callable[[], Any], metrics: dict[str, Any]) -> Any:
        """Run one step of the V1 trainer, with one or several updates."""
        return run()

    def warm_up_prompts(self, add: Callable[[Any], None], batches: Any) -> None:
        """Issue the prompts for which an asynchronous V1 trainer samples responses before its first step."""
        add(batches)

    def issue_prompts(self, add: Callable[[], None]) -> None:
        """Issue the prompts of one step of the V1 trainer."""
        add()

    def submit_prompts(self, send: Callable[[Any], int], batch: Any) -> int:
        """Send prompts to the V1 trainer's rollout servers; return the number of prompts sent."""
        return send(batch)

    def next_batch(self, prompts: PromptView) -> None:
        """Receive the prompts before responses are sampled."""

    def batch_flags(self) -> Mapping[str, Any]:
        """Return the flags to send to the workers with each batch of this step, except with rows added by an add-on."""
        return {}

    def old_log_prob(self, compute: Callable[[Any], Any], batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute pi_old in the V1 trainer; this is the first hook that receives these rows."""
        return compute(batch)

    def on_rollout(self, batch: BatchView) -> None:
        """Receive a batch whose rewards are known but whose pi_old has not been computed yet."""

    def shape_rewards(self, batch: BatchView, rewards: Tensor) -> Tensor | None:
        """Change the rewards, (n, T), that verl's estimator reads; the raw rewards are restored afterwards."""
        return None

    def estimate(self, batch: BatchView, rewards: Tensor) -> Tensor | None:
        """Compute advantages, (n, T), instead of verl's estimator; only one extension may implement this hook."""
        return None

    def shape_advantages(self, batch: BatchView, advantages: Tensor) -> Tensor | None:
        """Change the estimator's advantages, (n, T)."""
        return None

    def on_advantages(self, batch: BatchView, advantages: Advantages) -> None:
        """Receive the advantages that are sent to the workers, after all extensions have changed them."""

    def before_update(self) -> None:
        """Finish any work that an actor update would disturb."""

    def update_actor(self, run: Callable[[Any], Any], batch: Any, metrics: dict[str, Any]) -> Any:
        """Update the V1 trainer's actor, and read the metrics of the update."""
        return run(batch)

    def on_update(self, metrics: dict[str, Any], batch: Any) -> None:
        """Remove this add-on's reports from the metrics that the workers returned for their update on ``batch``.

        Raises:
            LivenessError: nothing proves that the configured add-on has an effect; the run stops.
        """

    def judge(self, reports: Sequence[Any]) -> Mapping[str, float]:
        """Judge the reports of one update, one per micro-batch and rank; return metrics by full name.

        Raises:
            LivenessError: nothing proves that the configured add-on has an effect; the run stops.
        """
        return {}

    def unproved(self) -> str | None:
        """Explain why the add-on is not yet known to have an effect, and name the responsible key; None if it is known.

        While a reason is returned, ``offpolicy/live/NAME`` is 0, and a warning is logged after 5, 10, 20, 40, ...
        updates.
        """
        return None

    def metrics(self) -> Mapping[str, float]:
        """Return the step's metrics by full name, such as ``opd/pass_rate``, for alarms and the logger."""
        return {}

    # Validation and checkpoints -----------------------------------------------------------------------------

    def validate(self, trainer: Any, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Run verl's validation, in one or several rounds."""
        return run()

    def validation_metrics(
        self, sources: Sequence[Any], uids: Sequence[Any], values: Mapping[str, Sequence[Any]]
    ) -> Mapping[str, float]:
        """Compute metrics of one validation, given each sample's data source, uid and the extra values from verl."""
        return {}

    @property
    def rate_limit_state(self) -> Mapping[str, Any] | None:
        """State of the staleness limit, to be saved in a checkpoint; None if there is no limit."""
        return None

    def state(self, folder: Path) -> Mapping[str, Any]:
        """Return the extension's state for a checkpoint, as JSON; store larger state in files under ``folder``."""
        return {}

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Restore a checkpoint's ``state``."""


__all__ = ["Advantages", "BoundLoss", "Extension", "WorkerExtension"]

BoundLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
"""One of verl's losses, called with (model_output, data, dp_group)."""


class WorkerExtension:
    """The part of an extension that is pickled and sent to the workers; it must contain only settings."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Map each column of ``BatchView.put`` that is recorded and shown in the report to its meaning."""
        return {}

    def wrap_loss(self, base_loss: BoundLoss, actor_config: Any) -> BoundLoss:
        """Add a term next to or inside verl's policy loss.

        Call ``base_loss`` with the unchanged micro-batch, whose ``rollout_is_weights`` are the correction's weight *
        keep. Add its loss to the sum with factor 1, because the proof expects verl's whole gradient plus the gradient
        of the term. With ``correction=none``, micro-batches on the engine path have no weights. The loss is wrapped
        again for each micro-batch.
        """
        return base_loss

    def report(self, rows: LossRows) -> Any:
        """Return a report on one micro-batch for ``Extension.judge``: plain Python, or a dataclass of plain values."""
        return None


_OF_ROLLOUTER = ("load_prompts", "next_batch", "validate", "validation_metrics")


def implements(add_on: AddOn, hook: str) -> bool:
    """Return True if an add-on implements ``hook``."""
    return getattr(getattr(add_on, hook), "__func__", None) is not getattr(AddOn, hook)


class Extension(AddOn):
    """A feature in addition to the corrections, enabled by its section of the configuration.

    Args:
        section: name of this section in the configuration.
        settings: the values of the section, in plain Python.

    Raises:
        SpecError: a setting is invalid; the key begins with the section.
    """

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        self.section = section
        self.settings = dict(settings)

    @property
    def needs_rollouter(self) -> Mapping[str, str]:
        """Map each key that depends on prompts, their columns or validation to an alternative that does not.

        In fully_async_policy, prompts and validation are handled outside the trainer's process.
        """
        acts = any(implements(self, hook) for hook in _OF_ROLLOUTER)
        return {self.section: f"Set {self.section}=null."} if acts else {}

    # Before Ray starts --------------------------------------------------------------------------------------

    @property
    def meaning(self) -> str:
        """Short description of the settings."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items() if not isinstance(value, Mapping))

    @property
    def replay_note(self) -> str:
        """Sentence that says what a replay of a recording omits or does not change; empty if there is none."""
        return ""

    @property
    def replaces_estimator(self) -> bool:
        """True if ``estimate`` returns advantages; only one extension of a run may do so."""
        return type(self).estimate is not Extension.estimate

    @property
    def reads_old_log_prob(self) -> bool:
        """True if pi_old is needed before the loss; ``correction.proximal=auto`` then means ``recompute``."""
        return False

    def configure(self, config: DictConfig) -> Sequence[str]:
        """Set keys of verl in place, such as the class of the agent loops; return one line per key."""
        return ()

    def problems(self, config: DictConfig) -> Iterable[Problem]:
        """Find conflicts between the settings and the whole configuration, with key, value, reason and fix."""
        return ()

    # With the run -------------------------------------------------------------------------------------------

    def worker(self) -> WorkerExtension | None:
        """Build the part that is sent to the workers; None if the workers need no such part and report nothing."""
        return None

    @property
    def sent(self) -> Mapping[str, int] | None:
        """Map the key of each row that the loss must receive to a hash of the row; None if rows are not compared.

        Before ``judge``, these hashes are compared with the reports' ``hashes``, except for rows that were removed from
        the update.
        """
        return None

    def silence(self, batch: BatchView, rows: Tensor) -> None:
        """Update ``sent`` for the rows in ``rows``, (n,) bool, which stay in the loss with an advantage of 0."""

    @property
    def resumes(self) -> str | None:
        """The key that makes a resumed run depend on ``state``; None if ``state`` is optional."""
        return None

    @property
    def noted(self) -> Mapping[str, Any]:
        """Settings that must be the same when a run resumes from a checkpoint."""
        return self.settings


def write_state(folder: Path, name: str, state: Any) -> None:
    """Write a JSON-serialisable state."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(state))


def read_state(folder: Path, name: str, section: str, schema: Any, key: str, expected: int) -> Any:
    """Read a state that ``write_state`` wrote.

    Args:
        section: name of the extension, for the error.
        schema: schema of the file, see ``fault_tolerance.state_schema``.
        key: a key of the state, whose value must have ``expected`` entries.

    Raises:
        CheckpointError: the checkpoint records the state, but the file is missing, invalid or from another checkpoint.
    """
    path, recorded = folder / name, f"the checkpoint records {expected} {name.removesuffix('.json')}"
    try:
        state = read_json(path, schema)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{section}: {recorded}, but {path} is missing. Fix: restore the file, or resume another checkpoint."
        ) from error
    if len(state[key]) != expected:
        refuse(path, key, len(state[key]), recorded)
    return state


KEY = "offpolicy.extensions"
"""Key of the mapping from a fork's own sections to "module:Class". Ray's processes receive it with the
configuration."""
SHIPPED: dict[str, str] = {
    "ess_lr": "recipe.offpolicy.extensions.vcpo:EssLr",
    "length_penalty": "recipe.offpolicy.extensions.length_penalty.length_penalty:LengthPenalty",
    "pass_at_k": "recipe.offpolicy.extensions.pass_at_k.pass_at_k:PassAtK",
    "optimal_baseline": "recipe.offpolicy.extensions.vcpo:OptimalBaseline",
    "turn_credit": "recipe.offpolicy.extensions.turn_credit:TurnCredit",
    "process_reward": "recipe.offpolicy.extensions.process_reward.prefix_value_rewards:PrefixValueRewards",
    # This section follows the others, because it replaces the advantages that they computed for the distilled rows.
    "opd": "recipe.offpolicy.extensions.opd.distillation:OnPolicyDistillation",
}
"""Maps each section of this package to "module:Class". Hooks run in this order, followed by a fork's hooks."""

own_launch: ContextVar[bool] = ContextVar("own_launch", default=True)
"""True if the user launches the run. The doctor sets it to False while it examines a launch script, so that no class is
imported and no address is contacted."""


def list_registered(config: DictConfig) -> dict[str, str]:
    """List all sections with a registered class, whether they are enabled or not."""
    own = OmegaConf.select(config, KEY)
    plain: Any = OmegaConf.to_container(own, resolve=True) if isinstance(own, DictConfig) else {}
    return SHIPPED | plain


def load_extensions(config: DictConfig) -> tuple[Extension, ...]:
    """Create the enabled extensions, in the order of their hooks.

    Raises:
        CheckError: a class cannot be imported, or settings are malformed; the message lists all problems.
    """
    made: list[Extension] = []
    problems: list[Problem] = []
    for section, target in list_registered(config).items():
        known = section in SHIPPED or own_launch.get()
        if not known or not isinstance(node := OmegaConf.select(config, section), DictConfig):
            continue
        settings: Any = OmegaConf.to_container(node, resolve=True)
        try:
            made.append(_class_of(section, target)(section, settings))
        except SpecError as error:
            problems.append(error.problem)
        except CheckError as error:
            problems += error.problems
    if problems:
        raise CheckError(problems)
    return tuple(made)


def find_problems(config: DictConfig) -> Iterator[Problem]:
    """Find invalid values of ``offpolicy.extensions``, and sections that are not mappings."""
    run = Configured(config)
    own = run.get(KEY)
    if own is not None and not isinstance(own, DictConfig):
        fix = f"Set {KEY}.SECTION=module:Class, or remove the key."
        yield run.problem(KEY, "this is not a mapping of sections to classes.", fix, {KEY: {}}, ())
        return
    for section in list_registered(config):
        key, node = f"{KEY}.{section}", run.get(section)
        if node is not None and not isinstance(node, DictConfig):
            fix = f"Set {section}.KEY=VALUE, or {section}=null."
            yield run.problem(section, "the section must be a mapping of keys to values.", fix, parts=())
        elif node is None and section not in SHIPPED:
            reason, fix = (
                "its section is missing, so it is disabled.",
                f"Set +{section}.KEY=VALUE, or remove this entry.",
            )
            yield run.problem(key, reason, fix, parts=(), verdict="NO-OP")
        elif section not in SHIPPED and not own_launch.get():
            reason = "the doctor does not import code that a script names, so it could not check this extension."
            fix = "Check the launch's overrides without --script, in the folder of its code."
            yield run.problem(key, reason, fix, parts=(), verdict="NOTE")


def _class_of(section: str, target: str) -> type[Extension]:
    key = f"{KEY}.{section}"
    module, _, name = str(target).partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        reason = f"this class cannot be imported ({error})."
        fix = "Set the entry to module:Class, with the module on PYTHONPATH, or remove the entry."
        raise SpecError(reason, fix, key=key, value=target) from error
    if not (isinstance(found, type) and issubclass(found, Extension)):
        reason = "the class is not a subclass of recipe.offpolicy.extensions.add_on.Extension."
        raise SpecError(reason, "Derive the class from Extension, or remove the entry.", key=key, value=target)
    return found
