"""What is measured, on which data, and how: tasks, baselines, the runner, metrics and plots.

Experiments know `llmcache` by its public names; only the replay of decisions looks at its adapters and fingerprints.
One YAML file describes one figure or table:

    config -> data -> model and head -> task (measure) -> metrics -> results/<experiment>/<run-id>/
"""
