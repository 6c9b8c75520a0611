"""A report of a running run: one file that is rewritten after each recorded step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ...fault_tolerance.redaction import redact
from ...recording import Recording, RecordingError
from .report_page import ReportContents, build_page
from .timeline import Part, merge_parts, summarize_steps


def follow(
    directory: Path, out: Path, seconds: int, say: Callable[[str], None], wait: Callable[[float], None] = time.sleep
) -> None:
    """Write the page whenever a step is added, until this process is interrupted; each step is read once.

    Args:
        directory: directory of the recording; it may not exist yet.
        out: the page, which a browser reloads every ``seconds``.
        say: called with a sentence whenever the page has been written, and once while there is nothing to read.

    Raises:
        RecordingError: a step is damaged.
    """
    read: dict[int, tuple[list[Path], list[Part]]] = {}
    waiting = False
    while True:
        try:
            recording = Recording(directory)
        except RecordingError as error:
            if list(directory.glob("step_*")):
                raise
            if not waiting:
                say(f"Waiting for the first step. {error}")
            waiting = True
        else:
            # Ranks and updates add files to a step.
            new = [step for step in recording.steps if read.get(step, ([], []))[0] != recording.files[step]]
            for step in new:
                read[step] = recording.files[step], summarize_steps(recording.only(step))
            timeline = merge_parts(part for step in sorted(read) for part in read[step][1])
            if new and timeline.steps:
                contents = ReportContents(
                    str(directory), redact(recording.card), redact(recording.proof), timeline, None, seconds
                )
                size = build_page(contents).write(out)
                say(f"{out}: {size:,} bytes. {contents.sentence}")
        wait(seconds)
