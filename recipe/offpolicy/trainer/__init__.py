"""Corrected versions of verl's trainers and task runners, and the checks of their updates."""
