"""Time limits for hanging runs, detection of lost workers, and checkpoints that stay loadable."""
