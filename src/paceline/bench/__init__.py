"""The command `paceline bench`: time and memory of an optimizer's step, next to torch's AdamW."""
