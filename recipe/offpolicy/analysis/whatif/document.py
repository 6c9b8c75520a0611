"""JSON document of a study.

Keys:

* ``schema``: 1; grows whenever a key is removed or changes its meaning.
* ``recording``: ``directory``, ``steps`` (list), ``rows``, ``tokens`` (response tokens).
* ``fidelity``: comparison of the recorded correction's replay with the recording: ``agrees`` (null: not compared),
  ``tolerance``, and the fields of ``fidelity.Fidelity``.
* ``corrections``: a list of
    * ``label``, ``base`` and ``point``, the grid's values by key;
    * ``spec``: plain values; null where it goes by what was recorded at each step;
    * ``overall``, ``groups`` (``length/le64``, ``advantage/negative``, ``staleness/is1``) and ``steps`` (by number):
      the fields of ``measures.CorrectionMeasures``; null where there is nothing to measure by;
    * ``turns`` (``turn/is0``): the fields of ``measures.TurnShare``.
* ``agreement``: ``labels`` and, in their order, the matrices of ``agreement.Agreement``; null where undefined.
* ``failures``: label -> why it was not replayed.
* ``notes``: what limits the figures.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Any

from .agreement import Agreement, Matrix
from .fidelity import TOLERANCE, Fidelity
from .outcomes import CorrectionOutcome, Study

SCHEMA = 1


def build_document(study: Study) -> dict[str, Any]:
    """Build the document, of plain values."""
    return {
        "schema": SCHEMA,
        "recording": {
            "directory": study.directory,
            "steps": list(study.steps),
            "rows": study.rows,
            "tokens": study.tokens,
        },
        "fidelity": {"agrees": _agrees(study.fidelity), "tolerance": TOLERANCE, **asdict(study.fidelity)},
        "corrections": [_correction(outcome) for outcome in study.outcomes],
        "agreement": {
            "labels": [outcome.candidate.label for outcome in study.outcomes],
            **{field.name: _plain(getattr(study.agreement, field.name)) for field in fields(Agreement)},
        },
        "failures": dict(study.failures),
        "notes": list(study.notes),
    }


def _agrees(fidelity: Fidelity) -> bool | None:
    return fidelity.agrees if fidelity.tokens or not fidelity.agrees else None


def _correction(outcome: CorrectionOutcome) -> dict[str, Any]:
    candidate = outcome.candidate
    return {
        "label": candidate.label,
        "base": candidate.base,
        "point": dict(candidate.point),
        "spec": None if candidate.spec is None else candidate.spec.to_mapping(),
        "overall": asdict(outcome.overall),
        "groups": {name: asdict(group) for name, group in outcome.groups.items()},
        "turns": {name: asdict(share) for name, share in outcome.turns.items()},
        "steps": {str(step): asdict(measured) for step, measured in outcome.steps.items()},
    }


def _plain(matrix: Matrix) -> list[list[float | None]]:
    return [[None if math.isnan(value) else float(value) for value in row] for row in matrix]
