"""Computation of pass@k from verl's validation dumps."""
