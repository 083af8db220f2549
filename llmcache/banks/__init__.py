"""(2) Layer-wise cache banks: what is stored of a request, how it is packed, and where its bytes lie.

request -> cache_banks   its record, its index rows and its states, under one lock
        -> layer_banks   all layers of one request
        -> compression   a codec packs each state
        -> bank          one layer: budgets, policy; the only place that evicts entries (of blocks: reuse.prefix)
        -> memory        where its entries lie
        -> stores        behind all banks and blocks: what outlives a process, or is shared
"""
