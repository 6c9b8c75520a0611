"""The length penalty as an extension, applied to rewards before verl's normalisation or to advantages after it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from ...batch.declared_keys import Configured
from ...correction import Problem
from ...fault_tolerance.state_schema import ANCHORS, CLASSES
from ...proof.verify import LivenessError
from ..add_on import Advantages, read_state, write_state
from ..advantage_proof import AdvantageExtension, AdvantageWorker, hash_advantages
from ..batch_view import BatchView, round_threshold
from ..setting_checks import divides_by_std
from ..validation_answers import Answer, captured, count_tokens, fix_classes, follow_classes
from .penalties import (
    Anchors,
    Measured,
    bound_error,
    compute_shift,
    measure,
    state_advantages,
    summarize_lengths,
)
from .settings import DATA_CLASS, LEAVE_OUT, LengthSettings, find_problems

logger = logging.getLogger("verl.offpolicy")

FILE, CLASSES_FILE = "anchors.json", "classes.json"
EASIER = {"path": f"pkg://{__name__.rpartition('.')[0]}.left_out", "name": "EasierPrompts"}
"""verl's key of the data set's class, for ``leave_out``."""


class LengthPenalty(AdvantageExtension):
    """Extension that applies the length penalty of one run; see ``settings.LengthSettings`` for its section."""

    title, prefix = "length penalty", "length"

    def __init__(self, section: str, settings: Mapping[str, Any]) -> None:
        super().__init__(section, settings)
        self.length = LengthSettings.from_mapping(section, settings)
        anchor = self.length.anchor
        self.anchors = Anchors(anchor.pass_rate, anchor.min_samples, anchor.window)
        self._acts = self.length.kind != "none" and self.length.coefficient > 0
        self._drops = self.length.truncated == "drop"
        self._dropped = False
        self._classes: dict[str, str] | None = None
        self._fixed_at = self._step = self._left_out = self._every = 0
        self._estimator, self._by_std = "grpo", True
        self._most_tokens: int | None = None
        self._measured: Measured | None = None
        self._warned = False

    # Before Ray starts --------------------------------------------------------------------------------------

    @property
    def meaning(self) -> str:
        length = self.length
        if length.kind == "none":
            return "none, lengths are measured" + (", truncated answers are dropped" if self._drops else "")
        reference = f" {length.reference}" if length.kind == "reference" else ""
        return f"{length.kind}{reference}, coefficient={length.coefficient:g}, {length.place} normalisation"

    def problems(self, config: DictConfig) -> Iterable[Problem]:
        return find_problems(self.section, self.length, Configured(config, self.section))

    def configure(self, config: DictConfig) -> Sequence[str]:
        if self.length.leave_out.dump is None or OmegaConf.select(config, f"{DATA_CLASS}.path"):
            return ()  # ``problems`` rejects a user's own class
        given = vars(self.length.leave_out) | {"correct_at_least": self.length.correct_at_least}
        with open_dict(config):
            OmegaConf.update(config, DATA_CLASS, EASIER, force_add=True)
            OmegaConf.update(config, f"data.{LEAVE_OUT}", given, force_add=True)
        return (f"{self.section}: {DATA_CLASS} is {EASIER['name']}, which leaves out prompts by their pass rates.",)

    # In the trainer -----------------------------------------------------------------------------------------

    @property
    def needs_rollouter(self) -> Mapping[str, str]:
        length, name = self.length, self.section
        by_source = length.kind == "anchor" and length.anchor.per == "source"
        by_row = length.kind == "reference" and isinstance(length.reference, str)
        used = {
            "leave_out.dump": length.leave_out.dump and f"Set {name}.leave_out.dump=null.",
            "classes.from_step": length.classes.from_step is not None and f"Set {name}.classes.from_step=null.",
            "anchor.per": by_source and f"Set {name}.anchor.per=prompt.",
            "reference": by_row and f"Set {name}.reference to a number of tokens.",
        }
        return {f"{name}.{key}": fix for key, fix in used.items() if fix}

    def load_prompts(self, loader: Any) -> Any:
        """Check that the training prompts do not include any prompt that must be left out."""
        if self.length.leave_out.dump is None:
            return loader
        from .left_out import EasierPrompts

        data = loader.dataset
        if not isinstance(data, EasierPrompts) or len(data) != data.total - data.left_out or not data.total:
            read = f"a {type(data).__name__} with {len(data)} prompts"
            raise LivenessError(f"{self.section}.leave_out: verl's loader reads {read}, and no prompt was left out.")
        self._left_out = data.left_out
        logger.info(
            "%s.leave_out LIVE: %d of %d training prompts are left out; %d are not in the dump, and are kept.",
            *(self.section, data.left_out, data.total, data.total - data.known),
        )
        return loader

    def begin(self, config: DictConfig) -> None:
        self._estimator = str(OmegaConf.select(config, "algorithm.adv_estimator"))
        replaced = OmegaConf.select(config, "pass_at_k.objective") not in (None, "none")
        self._by_std = divides_by_std(Configured(config)) and not replaced
        self._most_tokens = OmegaConf.select(config, "data.max_response_length")
        self._every = int(OmegaConf.select(config, "trainer.test_freq") or 0)

    def shape_rewards(self, batch: BatchView, rewards: Tensor) -> Tensor | None:
        self._step = batch.step
        self._measured = measured = measure(self.section, self.length, self.anchors, batch, self._most_tokens)
        self._note(measured)
        if not self._acts or self.length.place == "after":
            return None
        sessions = measured.sessions
        mask = batch.rows("response_mask")["response_mask"].bool()
        # For a row without a token, this is the first position.
        ends = (torch.arange(mask.shape[1]) * mask).amax(-1)
        rewards[torch.arange(len(rewards)), ends] -= measured.penalty[sessions.of_row].to(rewards.dtype)
        return rewards

    def shape_advantages(self, batch: BatchView, advantages: Tensor) -> Tensor | None:
        measured = self._measured
        assert measured is not None
        self._changed, self._demanded = 0, ""
        shaped = self._penalise(batch, advantages, measured) if self._acts and self.length.place == "after" else None
        if not self._drops:
            return shaped
        left = advantages if shaped is None else shaped
        cut = measured.sessions.truncated[measured.sessions.of_row]
        self._found["length/dropped_sequences"] = float(measured.sessions.truncated.sum())
        self._dropped = self._dropped or bool(cut.any())
        return left.masked_fill(cut[:, None], 0.0) if bool(left[cut].any()) else shaped

    def _penalise(self, batch: BatchView, advantages: Tensor, measured: Measured) -> Tensor | None:
        """Shift advantages after normalisation."""
        sessions = measured.sessions
        mask = batch.rows("response_mask")["response_mask"].bool()
        shift = compute_shift(measured.penalty, sessions.scores, measured.groups, by_std=self._by_std)
        shaped = advantages - shift[sessions.of_row].to(advantages.dtype)[:, None] * mask
        self._changed = int((shaped != advantages).any(-1).sum())
        there = mask.any(-1)[sessions.last]
        error = 1e-6 * (1 + float(advantages.abs().max()))
        for name, members in measured.groups.items():
            of_group = torch.where(there, shift, 0.0)[torch.tensor(members)].tolist()
            self._demand(name, of_group, [0.0] * len(members), error)
        self._note_share(shift, _by_row(advantages, mask)[sessions.last])
        return shaped if self._changed else None

    def on_advantages(self, batch: BatchView, advantages: Advantages) -> None:
        """Check the final advantages; ``_changed`` counts only this extension's changes.

        Raises:
            LivenessError: a dropped answer has a nonzero advantage, for example because a later extension changed it.
        """
        if not self._acts and not self._drops:
            return
        self._sent = hash_advantages(batch, advantages.final)
        if self._acts and self.length.place == "before":
            self._check_estimator(batch, advantages)
        for row, (_, response) in enumerate(batch.token_ids if self._drops else ()):
            if len(response) >= (self._most_tokens or math.inf) and bool(advantages.final[row].any()):
                raise LivenessError(
                    f"{self.section}.truncated=drop: sequence {row} has {len(response)} tokens, the maximum, but still "
                    f"has an advantage: a later extension changes the advantages of dropped answers."
                )

    def _check_estimator(self, batch: BatchView, advantages: Advantages) -> None:
        """Compare verl's advantages for the penalised rewards with a second implementation of verl's estimator.

        GRPO uses only the last row of each session; other estimators treat each row as a sample.
        """
        measured = self._measured
        assert measured is not None
        mask = batch.rows("response_mask")["response_mask"].bool()
        own = _by_row(advantages.own.double(), mask)
        there, rewards = mask.any(-1).tolist(), advantages.rewards.sum(-1).tolist()
        raw = batch.scores.sum(-1).tolist()
        moved, without = torch.zeros(2, len(own), dtype=torch.float64)
        for name, members in measured.groups.items():
            rows = measured.sessions.last[torch.tensor(members)]
            if self._estimator != "grpo":
                rows = torch.isin(measured.sessions.of_row, torch.tensor(members)).nonzero()[:, 0]
            numbers = rows.tolist()
            lowered = [rewards[row] for row in numbers]
            stated, plain = (
                state_advantages(each, estimator=self._estimator, by_std=self._by_std)
                for each in (lowered, [raw[row] for row in numbers])
            )
            error = bound_error(lowered, by_std=self._by_std)
            seen = [float(own[row]) if there[row] else stated[at] for at, row in enumerate(numbers)]
            for at, (found, due) in enumerate(zip(seen, stated, strict=True)):
                if not abs(found - due) <= error:
                    raise LivenessError(
                        f"{self.section}: in group {name}, rollout {at}, the advantage that {self._estimator} computed "
                        f"from the lowered rewards is {found:.6g} instead of {due:.6g}."
                    )
            self._demand(name, stated, plain, error)
            without[rows] = torch.tensor(plain, dtype=torch.float64)
            moved[rows] = torch.tensor(seen, dtype=torch.float64) - without[rows]
        self._changed = int((moved.abs() > 1e-6).sum())
        self._note_share(moved, without)

    def _demand(self, group: str, stated: Sequence[float], without: Sequence[float], error: float) -> None:
        """Record a group whose advantages must change."""
        at = max(range(len(stated)), key=lambda place: abs(stated[place] - without[place]))
        if not self._demanded and abs(stated[at] - without[at]) > 2 * error:
            changes = f"{without[at]:.6g} without the penalty, {stated[at]:.6g} with the penalty"
            self._demanded = f"group {group}, rollout {at}: {changes}"

    def worker(self) -> AdvantageWorker | None:
        return AdvantageWorker() if self._acts or self._drops else None

    def unproved(self) -> str | None:
        length, section, anchor, classes = self.length, self.section, self.length.anchor, self.length.classes
        if self._acts and not self._proved and length.kind == "anchor" and not self.anchors.frozen:
            return (
                f"no prompt has an anchor, because no prompt had a pass rate above {anchor.pass_rate:g} over at least "
                f"{anchor.min_samples} rollouts ({section}.anchor.pass_rate, {section}.anchor.min_samples)."
            )
        if self._acts and not self._proved:
            reason = "all sequences of a group received the same penalty"
            return f"no advantage was changed, because {reason} ({section}.kind)."
        if self._drops and not self._dropped:
            return f"no answer has reached data.max_response_length yet ({section}.truncated)."
        if length.leave_out.dump is not None and not self._left_out:
            return f"no prompt has a pass rate below {length.leave_out.below:g} ({section}.leave_out.below)."
        start = classes.from_step
        if start is not None and self._classes is None and self._step > start + self._every:
            return (
                f"no prompt can be classified as easy or hard, because no validation since step {start} had at least "
                f"{classes.samples} answers to any prompt ({section}.classes.samples)."
            )
        return None

    # Validation and metrics ---------------------------------------------------------------------------------

    def validate(self, trainer: Any, run: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Determine easy and hard prompts at the first validation at or after a given step, then track them."""
        classes, step = self.length.classes, int(trainer.global_steps)
        if classes.from_step is None:
            return run()
        with captured(trainer) as found:
            metrics = run()
        if not found or any(isinstance(value, dict | list) for value in metrics.values()):
            return metrics  # verl merges the results of several trainers later
        # Further rounds of pass@k sample only unsolved prompts.
        prompts, outputs, scores = found[0]
        least = round_threshold(self.length.correct_at_least)
        tokens = count_tokens(trainer.tokenizer, outputs)
        rights = (score >= least for score in scores)
        answers = [Answer(*each) for each in zip(prompts, tokens, rights, strict=True)]
        if self._classes is None and step >= classes.from_step:
            given = {name: value for name, value in vars(classes).items() if name != "from_step"}
            if fixed := fix_classes(answers, **given):
                self._classes, self._fixed_at = fixed, step
        if self._classes is None:
            return metrics
        followed = follow_classes(self._classes, answers)
        return metrics | {
            f"length/val/{name}/{what}": float(value)
            for name, each in followed.items()
            for what, value in each._asdict().items()
        }

    def _note(self, measured: Measured) -> None:
        sessions, lengths = measured.sessions, measured.sessions.tokens.tolist()
        found = summarize_lengths(sessions.tokens, measured.right, measured.groups)
        held = [each for each in zip(measured.anchors, lengths, strict=True) if each[0] is not None]
        if self.length.leave_out.dump:
            found["left_out_prompts"] = float(self._left_out)
        found |= {
            "truncated_share": float(sessions.truncated.double().mean()),
            "zero_variance_groups": float(measured.equal),
            "penalty/mean": float(measured.penalty.mean()),
            "penalty/warmup": measured.weight,
            "penalty/share_of_advantage": 0.0,
            "anchor/frozen": float(len(self.anchors.frozen)),
            "anchor/new": float(measured.new),
            "anchor/mean": sum(anchor or 0.0 for anchor, _ in held) / len(held) if held else math.nan,
            "anchor/over_share": sum(tokens > (anchor or 0.0) for anchor, tokens in held) / max(len(lengths), 1),
        }
        self._found = {f"length/{name}": value for name, value in found.items()}
        cut = int((sessions.truncated & measured.right).sum())
        if cut and not self._warned:
            self._warned = True
            logger.warning("%d answers were truncated at data.max_response_length, but count as correct.", cut)

    def _note_share(self, moved: Tensor, without: Tensor) -> None:
        total = float(moved.abs().sum() + without.abs().sum())
        share = float(moved.abs().sum()) / total if total > 0 else math.nan
        self._found["length/penalty/share_of_advantage"] = share

    # Checkpoints --------------------------------------------------------------------------------------------

    def state(self, folder: Path) -> Mapping[str, Any]:
        found = {}
        if self._classes is not None:
            write_state(folder, CLASSES_FILE, {"step": self._fixed_at, "classes": self._classes})
            found["classes"] = len(self._classes)
        if self.length.kind == "anchor":
            write_state(folder, FILE, self.anchors.to_json())
            found["anchors"] = len(self.anchors.frozen)
        return found

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        if "classes" in state:
            held = read_state(folder, CLASSES_FILE, self.section, CLASSES, "classes", state["classes"])
            self._classes, self._fixed_at = held["classes"], held["step"]
        if self.length.kind == "anchor" and "anchors" in state:
            self.anchors.restore(read_state(folder, FILE, self.section, ANCHORS, "frozen", state["anchors"]))

    @property
    def resumes(self) -> str | None:
        return f"{self.section}.kind=anchor" if self.length.kind == "anchor" else None


def _by_row(values: Tensor, mask: Tensor) -> Tensor:
    """Read the value of each row at its first token, (n,) float64; 0 for a row without tokens."""
    first = mask.int().argmax(-1)
    return torch.where(mask.any(-1), values[torch.arange(len(values)), first].double(), 0.0)
