"""What is measured, on which data, and how: tasks, methods, measures, metrics and plots.

Experiments know `llmcache` by its public names; only the recording that decisions are replayed from and the document
cache, which looks up and reuses states in its own way, look at its adapters and fingerprints. One YAML file describes
one figure or table:

    config -> task (data, model, requests) -> measure (methods, in turns) -> metrics -> results/<experiment>/<run-id>/
"""
