"""pass@k: unbiased estimates, extrapolation by a fit, and advantages that train pass@k."""
