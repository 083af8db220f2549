"""Commands of the library: one a file, each with a function `command` that parses, calls the library and prints.

    main       all commands that are installed, as one application
    options    what several commands take
    output     what they write; table: what they show

A command imports torch, transformers and FAISS inside its function, so that `llmcache --help` answers at once.
"""
