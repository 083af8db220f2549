"""What is measured, on which data, and how: tasks, baselines, the runner, metrics and plots.

Experiments know `llmcache` only through its public names. One YAML file describes one figure or table:

    config -> data -> model and head -> task (measure) -> metrics -> results/<experiment>/<run-id>/
"""
