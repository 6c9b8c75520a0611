"""The seam for what shapes rewards, advantages or the loss beside a correction; see docs/extensions.md."""
