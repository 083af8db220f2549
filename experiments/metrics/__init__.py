"""Figures, their intervals, best points of curves, and the numbers that the paper claims."""
