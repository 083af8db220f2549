"""(3) Matching and lookup engine: from fingerprints to a decision. It knows nothing of stored states.

fingerprint -> fingerprint_index   partitions by scope, length and layer
            -> index               neighbours in one partition
            -> content_gate        tokens that may not differ
            -> decision            similarity or risk of each neighbour, against a limit
answers: when two answers of the model are the same
"""

from llmcache.matching.decision import Consensus, Decision, Evidence, Threshold
from llmcache.matching.risk import Risk
from llmcache.registry import Registry

__all__ = ["DECISIONS", "Consensus", "Decision", "Evidence", "Risk", "Threshold"]

DECISIONS: Registry[Decision] = Registry(
    "decide",
    Decision,
    {"threshold": Threshold, "consensus": Consensus, "risk": Risk},
)
