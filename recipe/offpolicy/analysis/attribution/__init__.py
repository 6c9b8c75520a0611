"""Attribution of a run's mismatch to backend, staleness and drift; shows where the mismatch occurs and what causes it.

``attribution.attribute_rows`` explains recorded rows, ``causes.find_causes`` only looks for causes, and
``attribution_page.add_sections`` displays both results. The sums that training reports at every step are in
``monitor.mismatch_shares``.
"""
