"""The liveness proof: gradient checks and trials in the worker, the verdict in the trainer, and checks of mu."""
