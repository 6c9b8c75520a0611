"""Advantages by turn of a rollout with tools."""
