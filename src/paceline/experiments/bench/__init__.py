"""`paceline bench`: what a step costs here, beside its rivals, in one run."""
