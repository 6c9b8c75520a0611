"""The liveness proof: gradient and trials in the worker, their verdict in the trainer, arrival and alignment of mu."""
