"""Training language models: one loop for pretraining and fine-tuning, exact to the bit under faults."""
