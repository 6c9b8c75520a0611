"""Routing replay for mixtures of experts, in which the trainer's routers use the experts recorded for each token."""
