"""Routing replay for mixtures of experts: the trainer's routers choose the experts that were recorded for a token."""
