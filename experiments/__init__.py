"""Experiments: tasks, streams, baselines and plots; knows llmcache only through its public names."""
