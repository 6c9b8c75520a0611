"""verl's ``rollout_corr`` metrics and masks from one pass over a batch, for ``translate.verl_rollout_correction``."""
