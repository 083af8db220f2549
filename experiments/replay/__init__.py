"""What caches would have done, from one recorded pass of the model; nothing is timed here.

task -> recording   states, outputs and answers of one pass
     -> replay      hits and answers at many thresholds; advance: one chosen in advance
     -> rehearsal   calibrated reuse, many times over
keys -> eviction    hits of each policy, beside the most that any could have (w_tinylfu: one to compare with)
"""
