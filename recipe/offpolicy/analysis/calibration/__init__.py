"""Bounds that keep a wanted share: from recordings, and online."""
