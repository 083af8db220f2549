"""Figures, their intervals, best points of curves, and the numbers that the paper claims. Pure functions.

answers and times of one method -> metrics    hit rate, changed answers, quality, speed-up, intervals
                                -> frontier   the best threshold in hindsight
paper: what LLMCache (Bansal 2025) claims, to compare with
"""
