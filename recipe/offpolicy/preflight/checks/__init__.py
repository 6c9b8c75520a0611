"""Start-up checks for settings that would leave a configured correction unused, make it wrong, or apply it twice."""
