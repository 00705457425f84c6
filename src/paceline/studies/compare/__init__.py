"""Several ways to train, side by side on the same data: `paceline compare`."""
