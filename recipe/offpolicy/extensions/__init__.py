"""Extensions: hooks that shape rewards, advantages or the loss in addition to a correction; see docs/extensions.md."""
