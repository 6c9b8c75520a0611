"""Process rewards, which credit each episode of a response with the increase in log p(answer | prefix)."""
