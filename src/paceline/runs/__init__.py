"""One run: its description, what it is built of, its records."""
