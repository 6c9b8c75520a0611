"""Limits on hangs, detection of lost workers, and checkpoints that stay loadable."""
