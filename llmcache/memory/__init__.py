"""What is kept: requests by exact key, K/V in blocks, vectors in indexes, values in stores.

bank       entries of requests by exact key, within the budget
policies   which entry to evict
blocks     K/V and states of prompts, in blocks
index      nearest vectors, by FAISS
stores     values outside memory, on disk or Redis
purges     what was purged or forgotten while calls were under way
"""
