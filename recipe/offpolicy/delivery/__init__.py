"""Proof that the rollout engine holds the trainer's weights: sums of every parameter, and answers to a fixed probe."""
