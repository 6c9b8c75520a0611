"""Replay of truncated sampling: trainer's policies renormalised over the tokens that the rollout engine allowed."""
