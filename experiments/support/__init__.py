"""What all rooms of the experiments use. Imports none of them.

section: a checked part of settings; files: where things lie, written whole, by one process at a time
environment: what a figure depends on besides; progress: shown outside what is timed; nearest: vectors in FAISS
"""
