"""(3) Matching and lookup engine: from fingerprints to a decision. It knows nothing of stored states.

fingerprint -> fingerprint_index   partitions by scope, length and layer
            -> index               neighbours in one partition
            -> content_gate        tokens that may not differ
            -> decision            similarity or risk of each neighbour, against a limit
answers: when two answers of the model are the same
"""
