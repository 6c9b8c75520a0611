"""A task with answers of free length, and what length penalties make of it."""
