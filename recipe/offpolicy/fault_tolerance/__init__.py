"""A run that hangs or loses a worker ends with its cause; a checkpoint stays loadable."""
