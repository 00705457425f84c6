"""The paper's experiments: the runs of each figure at three scales, and what is drawn of them."""
