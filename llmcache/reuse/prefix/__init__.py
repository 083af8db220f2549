"""The exact `prefix` rung: what causal models made of the beginning of a stored request serves requests that share it.

`chain` names blocks of tokens by all that comes before them, `blocks` holds what was computed for them, `prefill` puts
that into a call.
"""
