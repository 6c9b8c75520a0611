"""Off-policy corrections as pure functions of three log-probs, a mask and advantages.

Needs torch alone. The three log-probs, each (B, T):

* ``rollout_log_prob``, mu: what the rollout engine sampled from;
* ``old_log_prob``, pi_old: the trainer's own weights at the start of the step;
* ``log_prob``, pi: the current policy, which changes at every optimizer step.

``rollout_stage`` does all that mu and pi_old decide, ``step_stage`` all that needs pi or the advantages.
"""

from .spec import CorrectionSpec, MaskSpec, SpecError, WeightSpec
from .stages import RolloutStage, StepStage, rollout_stage, step_stage
from .statistics import Reduction, Statistic

__all__ = [
    "CorrectionSpec",
    "MaskSpec",
    "Reduction",
    "RolloutStage",
    "SpecError",
    "Statistic",
    "StepStage",
    "WeightSpec",
    "rollout_stage",
    "step_stage",
]
