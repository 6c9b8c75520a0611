"""Recording what a run's corrections saw and did, and reading it again: needs pyarrow, nothing of verl."""

from .files import RecordingError, Step
from .recording import Recording
from .rows import Rows, concatenated

__all__ = ["Recording", "RecordingError", "Rows", "Step", "concatenated"]
