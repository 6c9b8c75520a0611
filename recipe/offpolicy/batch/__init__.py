"""verl's batches and micro-batches: tensors, padding, checksums, and the plan that travels with each update."""
