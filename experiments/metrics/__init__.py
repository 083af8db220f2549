"""Figures, their intervals, best points of curves, and the paper's figures. Pure functions.

answers and times of one method -> metrics    hit rate, changed answers, quality, speed-up, intervals
                                -> frontier   the best threshold in hindsight
paper: figures claimed by LLMCache (Bansal 2025), for comparison
"""
