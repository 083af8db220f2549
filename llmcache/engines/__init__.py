"""What computes the trunk's output. Engines know nothing of what is stored, and the cache not what runs."""
