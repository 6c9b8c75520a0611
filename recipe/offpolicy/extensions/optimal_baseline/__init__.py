"""The baseline of least variance for weighted gradients, per group."""
