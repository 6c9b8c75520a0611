"""Limits how far sampling may run ahead of training: controls how fast prompts are issued, and handles old rows."""
