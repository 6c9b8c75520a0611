"""Extensions: hooks that shape rewards, advantages or the loss beside a correction; see docs/extensions.md."""
