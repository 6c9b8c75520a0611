"""pass@k: unbiased estimates, a fit that extrapolates, and advantages that train it."""

from .beta_binomial import NotIdentified, fit
from .estimators import unbiased, unbiased_dynamic
from .training import advantages

__all__ = ["NotIdentified", "advantages", "fit", "unbiased", "unbiased_dynamic"]
