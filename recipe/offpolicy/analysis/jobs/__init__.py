"""Work on the steps of a recording, in order, by processes of this machine or tasks of a Ray cluster."""

from .jobs import ALONE, Jobs, JobsError, prepare_process, read_arguments
from .map_steps import map_steps
from .progress import show_progress

__all__ = ["ALONE", "Jobs", "JobsError", "map_steps", "prepare_process", "read_arguments", "show_progress"]
