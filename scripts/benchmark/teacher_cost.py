"""Measures the cost of a teacher's log-probs for the server and the client, in microseconds per prompt position.

    bash scripts/teacher.sh MODEL --port 8100 &
    python scripts/benchmark/teacher_cost.py http://127.0.0.1:8100 --pid $!

Rows of random ids are requested in the same way as by ``opd``. Figures are medians over the repeats, except for the
first, which is not counted. The client's figure is the CPU time of this process; the server's is the CPU time of the
process ``--pid`` and its descendants. The time until the answer is also shown.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.harness import add_counts, build_parser, list_processes, read_seconds, take_turns

LEAST_ID, MOST_ID = 3, 20
"""A range of ids that exist in every vocabulary."""


def measure(url: str, *, rows: int, tokens: int, repeats: int, pid: int | None = None) -> tuple[float, float, float]:
    """Measure the cost of ``rows`` rows of ``tokens`` ids, half of which belong to the prompt; return medians.

    Returns:
        Microseconds per prompt position: wall time from the first request to the last answer, CPU time of this process,
        and CPU time of the server's processes (0 without ``pid``).
    """
    # Imported here because these packages take seconds to import and --help does not need them.
    from recipe.offpolicy.extensions.opd.settings import TeacherSettings
    from recipe.offpolicy.extensions.opd.start_up import find_model
    from recipe.offpolicy.extensions.opd.teacher_client import Row, TeacherClient

    settings = TeacherSettings(urls=(url,))
    client = TeacherClient(settings, *find_model(settings))
    ids = random.Random(1)

    def read_server() -> float:
        return sum(map(read_seconds, list_processes(pid))) if pid is not None else 0.0

    def ask() -> tuple[float, float, float]:
        drawn = [tuple(ids.randint(LEAST_ID, MOST_ID) for _ in range(tokens)) for _ in range(rows)]
        asked = [Row(number, row[: tokens // 2], row[tokens // 2 :]) for number, row in enumerate(drawn)]
        own, theirs = time.process_time(), read_server()
        scoring = client.start(asked)
        client.wait(scoring)
        return scoring.seconds, time.process_time() - own, read_server() - theirs

    try:
        seen = take_turns({"ask": ask}, repeats)["ask"]
    finally:
        client.close()
    answer, own, theirs = (statistics.median(each) * 1e6 / (rows * tokens) for each in zip(*seen, strict=True))
    return answer, own, theirs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = build_parser(__doc__)
    parser.add_argument("url", help="address of the server, which serves one model")
    add_counts(parser, rows=64, tokens=64, repeats=5)
    parser.add_argument("--pid", type=int, help="process of the server, if it runs on this machine")
    given = parser.parse_args(arguments)
    answer, client, own = measure(**vars(given))
    server = "not known without --pid" if given.pid is None else f"{own:.1f} us of CPU"
    print(f"{given.rows} rows of {given.tokens} ids; a prompt position: answered in {answer:.1f} us")
    print(f"  client {client:.1f} us of CPU, server {server}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
