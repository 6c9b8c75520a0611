"""Replay of truncated sampling: renormalises the trainer's policies over the tokens that the rollout engine allowed."""
