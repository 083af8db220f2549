"""Which way to answer pays on one's own requests: each way replays a log, and one of them is recommended.

    first half   computed, and learned from
    second half  served by each way in turn, one request a call, back to back; limited by time

The times are of this machine, with nothing else running. A way without a cache is recommended where it is as fast.
"""
