"""`python -m llmcache` is the `llmcache` command."""

from llmcache.cli.main import main

if __name__ == "__main__":
    main()
