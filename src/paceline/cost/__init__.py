"""The command `paceline cost`: bytes that an optimizer keeps, and its share of a training step."""
