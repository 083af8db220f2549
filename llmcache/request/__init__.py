"""What is read from a call and reported of it. Nothing here stores, evicts or decides.

arguments -> call_signatures   facts about all calls with arguments of the same form; the state of the trunk
          -> bypass            the reason, if any, why the call cannot use the cache
          -> reading           copies its tokens to the host
          -> rows              its requests, with valid tokens and exact key; their common scope
answers   -> outcome           the outcome of each request, for the user
          -> counters          counts of requests and failures
"""
