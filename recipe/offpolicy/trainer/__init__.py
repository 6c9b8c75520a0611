"""Corrected versions of verl's trainers and task runners, and the supervision of their updates."""
