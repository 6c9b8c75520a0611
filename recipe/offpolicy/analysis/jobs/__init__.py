"""Work on the steps of a recording, in order, by processes of this machine or tasks of a Ray cluster."""

from .jobs import Jobs, JobsError, read_arguments
from .progress import show_progress

__all__ = ["Jobs", "JobsError", "read_arguments", "show_progress"]
