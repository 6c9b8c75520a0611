"""Off-policy corrections as pure functions of three log-probs, a mask and the advantages.

The package needs only torch. Each log-prob tensor is (B, T), or a nested tensor of rows with layout ``torch.jagged``:

* ``rollout_log_prob``, mu: the policy from which the rollout engine sampled;
* ``old_log_prob``, pi_old: the trainer's own weights at the start of the step;
* ``log_prob``, pi: the current policy, which changes at every optimizer step.

``rollout_stage`` makes all decisions that depend only on mu and pi_old, and ``step_stage`` makes those that need pi or
the advantages.
"""

from .correction_parts import proximal_log_prob
from .decisions import BatchConstants, batch_constants, count_kept_by_row
from .masks import MaskSpec
from .problem import Problem, SpecError
from .spec import CorrectionSpec
from .stages import RolloutStage, StepStage, rollout_stage, step_stage
from .statistics import Reduction, Statistic
from .units import turns
from .weights import WeightSpec

__all__ = [
    "BatchConstants",
    "CorrectionSpec",
    "MaskSpec",
    "Problem",
    "Reduction",
    "RolloutStage",
    "SpecError",
    "Statistic",
    "StepStage",
    "WeightSpec",
    "batch_constants",
    "count_kept_by_row",
    "proximal_log_prob",
    "rollout_stage",
    "step_stage",
    "turns",
]
