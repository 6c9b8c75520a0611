"""Proves, by checksums of all parameters and by a fixed probe, that the rollout engine has the trainer's weights."""
