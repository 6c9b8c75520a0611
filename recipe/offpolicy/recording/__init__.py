"""Recorder of what a run's corrections saw and did, and its reader: needs pyarrow and xxhash, nothing of verl."""

from .files import RecordingError, Step
from .recording import Recording
from .rows import Rows, concatenate

__all__ = ["Recording", "RecordingError", "Rows", "Step", "concatenate"]
