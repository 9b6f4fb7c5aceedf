"""Examples: run the scripts from a clone of the repository."""
