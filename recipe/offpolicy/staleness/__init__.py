"""Limits how far sampling may run ahead of training, by the rate of issued prompts and the handling of old rows."""
