"""Set-up of this package's logger, for runs in which verl does not set up its own.

verl's V1 trainer sets up the logger ``verl``, but its V0 trainer does not, so INFO messages would be lost, for example
the message that a correction is live.
"""

from __future__ import annotations

import logging
import os

from ..fault_tolerance.redaction import redact_text

logger = logging.getLogger("verl.offpolicy")
LEVEL = "VERL_LOGGING_LEVEL"
"""verl's variable for the level of its loggers."""


class _Redaction(logging.Filter):
    """Redacts every log record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact_text(record.getMessage()), ()
        return True


def set_up_logger() -> None:
    """Redact the logger's output, and add a handler if verl's logger has none; idempotent."""
    if not any(isinstance(each, _Redaction) for each in logger.filters):
        logger.addFilter(_Redaction())
    if logging.getLogger("verl").handlers or logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(os.environ.get(LEVEL, "INFO"))
    logger.propagate = False
