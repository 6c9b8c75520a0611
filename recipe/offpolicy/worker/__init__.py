"""The loss that runs in the workers, for engines and legacy actors, and its metrics."""
