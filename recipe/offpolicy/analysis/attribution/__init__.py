"""Attribution of a run's mismatch: backend, staleness and drift, where it sits, and its causes.

``attribution.attribute_rows`` explains recorded rows, ``causes.find_causes`` judges the causes alone,
``page.add_sections`` shows both. The sums that training reports at every step are in ``monitor.mismatch``.
"""
