"""How far sampling may run ahead of training: how fast prompts are issued, and what happens to too-old rows."""
