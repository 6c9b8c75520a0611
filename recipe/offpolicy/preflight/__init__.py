"""Everything that stops a launch before Ray starts: composition, resolution and start-up checks."""
