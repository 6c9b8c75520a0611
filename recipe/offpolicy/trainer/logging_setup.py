"""Set-up of this package's logger where verl sets up none.

verl's V1 trainer sets up the logger ``verl``; around its V0 trainer nobody sets up any, and whatever is logged at INFO,
such as that a correction is live, would be lost.
"""

from __future__ import annotations

import logging
import os

from ..fault_tolerance.redaction import redact_text

logger = logging.getLogger("verl.offpolicy")
LEVEL = "VERL_LOGGING_LEVEL"
"""verl's own variable for the level of its loggers."""


class _Redaction(logging.Filter):
    """Redacts what is logged, whoever writes it."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact_text(record.getMessage()), ()
        return True


def set_up_logger() -> None:
    """Redact what the logger writes, and give it a handler of its own where verl's has none; idempotent."""
    if not any(isinstance(each, _Redaction) for each in logger.filters):
        logger.addFilter(_Redaction())
    if logging.getLogger("verl").handlers or logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(os.environ.get(LEVEL, "INFO"))
    logger.propagate = False
