"""`python -m llmcache` is the `llmcache` command."""

from llmcache.cli import main

if __name__ == "__main__":
    main()
