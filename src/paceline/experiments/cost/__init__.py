"""`paceline cost`: memory, time, communication and checkpoints of a training, on paper. Imports no torch."""
