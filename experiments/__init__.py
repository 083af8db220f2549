"""Experiments: tasks, methods, measures, metrics and plots.

Experiments use `llmcache`'s public names. Only the recordings for replays, and the document cache, which does its own
lookup and reuse, use its adapters and fingerprints. One YAML file describes one figure or table:

    config -> task (data, model, requests) -> measure (methods, in turns) -> metrics -> results/<experiment>/<run-id>/
"""
