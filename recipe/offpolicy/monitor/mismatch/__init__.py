"""Online decomposition of the mismatch log pi / mu, reported at every training step."""
