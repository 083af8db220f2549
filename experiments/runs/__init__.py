"""From a YAML file to a folder of results, and reading it again."""
