"""verl's trainers and task runners with corrections, and the supervision of their updates."""
