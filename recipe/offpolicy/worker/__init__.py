"""The loss that runs in the workers (engine workers and legacy actors), and its metrics."""
