"""Process rewards, which credit each episode of a response with its contribution to log p(answer | prefix)."""

from .advantages import token_advantages, utilities
from .prefix_scorer import episode_ends

__all__ = ["episode_ends", "token_advantages", "utilities"]
