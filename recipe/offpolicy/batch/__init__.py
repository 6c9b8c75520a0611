"""verl's batches and micro-batches: tensors, padding, checksums, and the plan sent with each update."""
