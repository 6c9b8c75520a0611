"""Recorder and reader of the inputs and decisions of a run's corrections; both need pyarrow and xxhash, but not
verl."""

from .files import RecordingError, Step
from .recording import Recording
from .schema import Rows, concatenate

__all__ = ["Recording", "RecordingError", "Rows", "Step", "concatenate"]
