"""Names of values sent with a row by the agent loops, and of columns for the workers."""

from __future__ import annotations

SECTION = "process_reward"
FIELD = "offpolicy_process"
"""Key of a row's extra fields, see ``prefix_scorer.RowValues``."""
UTILITY = "offpolicy_process_utility"
"""float32 per token: the utility of the episode that ends here; NaN elsewhere."""
