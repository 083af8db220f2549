"""Scores of a whole task's answers, as its authors define them."""
