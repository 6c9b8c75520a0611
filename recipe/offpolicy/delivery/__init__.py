"""Proof that the rollout engine holds the trainer's weights: checksums of every parameter and a fixed probe."""
