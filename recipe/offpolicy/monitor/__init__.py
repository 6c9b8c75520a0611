"""What is watched while a run trains: alarms, moving bounds, mismatch, the active correction and its cost."""
