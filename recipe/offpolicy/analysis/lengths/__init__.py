"""Length of answers by correctness over steps, from a run's metrics or from a recording."""
