"""Corrected versions of verl's trainers and task runners, with checks of each update."""
