"""Our optimizers in the trainers of others: a file each, which imports that trainer and `paceline.optim`."""
