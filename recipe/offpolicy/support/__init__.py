"""Support replay: renormalises the policies over the tokens that truncated sampling in the rollout engine allowed."""
