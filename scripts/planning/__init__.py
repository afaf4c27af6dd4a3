"""Memory and hand-offs of a model on paper, by its config alone."""
