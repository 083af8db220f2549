"""Scores of a whole task's answers, as its authors define them; one file a task.

answers of all requests -> exact match, F1, ...   where the mean over requests is not the score
"""
