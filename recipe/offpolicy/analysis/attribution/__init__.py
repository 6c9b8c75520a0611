"""Where the mismatch of a run comes from: backend, staleness and drift, where it sits, and what causes it.

``attribution.explain`` says everything of recorded rows, ``causes.find_causes`` the causes alone, ``page.add_sections``
shows it; ``statistics`` is the part that training reports at every step, which needs torch alone.
"""
