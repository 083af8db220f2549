"""Streams of requests, in the order in which a service would see them.

records -> traffic, support_desk   order and repeats of requests, or of keys alone
        -> prompts                 texts with common prefixes
"""
