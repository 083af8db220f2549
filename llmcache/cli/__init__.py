"""Commands of the library: one per file, each with a function `command` that parses, calls the library and prints.

    main       all installed commands as one application
    options    options shared by several commands
    output     writing of result files
    table      tables on the console

A command imports torch, transformers and FAISS inside its function, so that `llmcache --help` answers at once.
"""
