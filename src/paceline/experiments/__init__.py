"""Runs of the engine: their description, what they are built of, their records."""
