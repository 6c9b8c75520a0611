"""Attribution of a run's mismatch to backend, staleness and drift; shows where the mismatch occurs and what causes it.

``attribution.attribute`` attributes the mismatch in a recording, ``causes.find_causes`` only searches for causes, and
``attribution_page.build_page`` displays both results. The sums that training reports at every step are in
``monitor.mismatch_shares``.
"""
