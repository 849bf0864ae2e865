"""Table 3 of the paper as an experiment."""
