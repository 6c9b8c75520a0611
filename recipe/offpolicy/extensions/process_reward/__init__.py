"""Process rewards, which credit each episode of a response with its contribution to log p(answer | prefix)."""
