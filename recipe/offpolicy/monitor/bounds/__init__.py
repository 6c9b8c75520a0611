"""Bounds of masks and caps of weights that follow a target while a run trains."""
