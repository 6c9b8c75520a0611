"""Composition, resolution and start-up checks: everything that can stop a launch before Ray starts."""
