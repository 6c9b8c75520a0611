"""Proof, by checksums of every parameter and by a fixed probe, that the rollout engine has the trainer's weights."""
