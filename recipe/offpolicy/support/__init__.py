"""Replay of truncated sampling: the policies are renormalised over the tokens that the rollout engine allowed."""
