"""Advantages per turn of a rollout with tools."""
