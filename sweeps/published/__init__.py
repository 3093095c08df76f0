"""Published results as data: what was printed, what follows from it, and what does not."""
