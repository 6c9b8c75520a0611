"""Off-policy corrections for verl: configured by Hydra, computed in the worker, proved live at the first update."""
