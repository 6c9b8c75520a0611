"""Length of correct and wrong answers over the steps, from a run's metrics or from a recording."""
