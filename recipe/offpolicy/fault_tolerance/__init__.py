"""Time limits for hanging runs, detection of dead workers, and checkpoints that stay loadable."""
