"""pass@k: unbiased estimates, a fit that extrapolates, and advantages that train it."""

from .estimators import advantages, unbiased, unbiased_dynamic
from .summary import NotIdentified, fit

__all__ = ["NotIdentified", "advantages", "fit", "unbiased", "unbiased_dynamic"]
