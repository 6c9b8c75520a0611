"""Replay of truncated sampling, which renormalises the policies over the tokens that the rollout engine allowed."""
