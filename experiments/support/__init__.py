"""Utilities for all folders of the experiments. Imports none of them.

section: a checked part of settings; files: folders, and files written whole, by one process at a time
environment: conditions of a figure; progress: shown outside timed code; nearest: vectors in FAISS
"""
