"""Routing replay for mixtures of experts: the trainer's routers use the experts that were recorded for each token."""
