"""Runs other people's tests on wrapped models, and reports where the cache made a difference.

`plugin` is the pytest plug-in; `python -m judge` runs all families in all ways and prints the verdict.
"""
