"""pass@k: unbiased estimates, extrapolation by a fit, and advantages that train pass@k."""

from .estimators import advantages, unbiased, unbiased_dynamic
from .summary import NotIdentified, fit

__all__ = ["NotIdentified", "advantages", "fit", "unbiased", "unbiased_dynamic"]
