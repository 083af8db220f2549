"""Data of one call. No store, no policy, no decision.

arguments -> bypass    why the call cannot use the cache, if so
          -> rows      its requests: valid tokens, exact key; the scope they share
          -> call      what is read, planned and done, as far as it came
          -> prefill   what it has to do with stored prefixes
          -> outcome   what became of each request, for the user
"""
