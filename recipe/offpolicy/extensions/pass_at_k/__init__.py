"""pass@k: unbiased estimates, extrapolation with a fitted distribution, and advantages that train pass@k."""
