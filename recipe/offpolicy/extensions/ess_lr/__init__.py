"""A learning rate that follows the effective sample size of the weights."""
