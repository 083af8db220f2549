"""Runs other people's tests on wrapped models, and says where the cache made a difference.

`plugin` is what pytest loads; `python -m judge` runs all families in all ways and prints the verdict.
"""
