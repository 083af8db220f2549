"""Engines compute the trunk's output. They do not know what is stored; the cache does not know which one runs."""
