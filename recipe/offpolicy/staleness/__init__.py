"""How far sampling may run ahead of training: the rate at which prompts are issued, and rows that are too old."""
