"""Liveness proof: gradient and trials in the worker, the verdict in the trainer, and checks of mu."""
