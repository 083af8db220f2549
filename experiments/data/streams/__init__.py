"""Streams of requests, in the order in which a service would see them.

records -> traffic, support_desk   order and repeats of requests
        -> prompts                 texts with common prefixes
keys: requested entries, for measuring eviction alone
"""
