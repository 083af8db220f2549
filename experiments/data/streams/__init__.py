"""Streams of requests, in the order in which a service would see them.

records -> traffic, support_desk   which request comes next, and which come again
        -> prompts                 texts that share their beginnings
        -> arrivals                when each comes
keys: which entries are asked, for questions about eviction alone
"""
