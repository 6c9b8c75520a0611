"""Everything that can stop a launch before Ray starts: composition, resolution and start-up checks."""
