"""The data of one call. Nothing here stores, evicts or decides.

arguments -> bypass    the reason, if any, why the call cannot use the cache
          -> reading   copies its tokens to the host
          -> rows      its requests, with valid tokens and exact key; their common scope
          -> call      the state of the call, filled step by step
          -> prefill   its blocks, if the caller keeps K/V
          -> outcome   the outcome of each request, for the user
"""
