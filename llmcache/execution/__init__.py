"""(4) Layer execution manager, second half: the order of a call, and what is done at each step of it.

call -> flow         every step in order
     -> meter, cost  whether the cache is worthwhile for calls of this length
     -> bypass_check why it cannot use the cache
     -> reader       its rows, read on the host
     -> lookup       what the rungs say may be reused; fast_path, runner: carried out
     -> capture      states of misses, stored at the end; recorder: outputs of bypassed calls
"""
