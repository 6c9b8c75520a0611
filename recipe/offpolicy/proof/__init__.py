"""The liveness proof: the worker checks gradients and runs trials, and the trainer checks the results and mu."""
