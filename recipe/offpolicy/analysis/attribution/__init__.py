"""Attribution of a run's mismatch to backend, staleness and drift, where the mismatch occurs, and its causes.

``attribution.attribute_rows`` explains recorded rows, ``causes.find_causes`` judges only the causes, and
``page.add_sections`` displays both results. The sums that training reports at every step are in ``monitor.mismatch``.
"""
