"""Names by which values travel: beside a row from the agent loops, and as columns to the workers."""

from __future__ import annotations

SECTION = "process_reward"
FIELD = "offpolicy_process"
"""Key of a row's extra fields, see ``prefix_scorer.RowValues``."""
UTILITY = "offpolicy_process_utility"
"""float32 by token: the utility of the episode that ends here; NaN elsewhere."""
