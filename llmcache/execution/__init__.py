"""(4) Layer execution manager, second half: the order of a call, and what is done at each step of it.

call -> flow         every step in order
     -> bypass_check may it use the cache? meter, cost: is that worthwhile for calls of this length?
     -> reader       its rows, read on the host
     -> lookup       what the rungs say may be reused
     -> runner       each layer is run for some rows, or skipped; fast_path: all layers at once
     -> capture      states of misses, stored at the end; recorder: outputs of bypassed calls
"""
