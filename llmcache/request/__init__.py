"""Data of one call. No store, no policy, no decision.

arguments -> bypass    the reason why the call cannot use the cache, if there is one
          -> reading   copies its tokens to the host
          -> rows      its requests: valid tokens, exact key; the scope they share
          -> call      all that is known of the call, filled step by step
          -> prefill   its blocks, where the caller keeps K/V
          -> outcome   the outcome of each request, for the user
"""
