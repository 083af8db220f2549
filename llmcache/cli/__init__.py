"""Commands of the library: one per file, each with a function `command` that parses, calls the library and prints.
A command imports torch, transformers and FAISS inside its function, so that `llmcache --help` answers at once.
"""
