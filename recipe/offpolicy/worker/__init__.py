"""The loss that runs in the workers, on engines and legacy actors, and its metrics."""
