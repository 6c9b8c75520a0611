"""Extensions: hooks that change rewards, advantages or the loss in addition to a correction; see docs/extensions.md."""
