"""The exact `prefix` rung: what causal models made of the beginning of a stored request serves requests that share it.

The same blocks hold whole requests, for the exact rung.

request -> block_hash   names of its blocks of tokens, each by all that comes before it
        -> block_pool   K/V and last states that were computed for them, side by side in slabs; evicts within a budget
        -> kv_fill      laid out as the batch has them, into the caller's K/V cache
        -> rung         the trunk runs on what is left, and its output is completed
"""
