"""Utilities that know nothing of caches: arrays, threads, memory, files, registries, context variables."""
