"""(4) Layer execution manager, first half: the rungs that decide what is reused. `execution` carries it out.

    call -> prefix     what causal models made of its first tokens, or of whole requests; before the layers
    rows -> exact      the same request: its own state
         -> semantic   a neighbour whose risk is within the limit (chooser); or
         -> paper      Algorithm 1 of the paper, a search per layer
         -> Reuse      one row, one layer, one stored state

One file a rung, safest first: a row goes to the first rung that serves it.
"""

from llmcache.banks.cache_banks import CacheBanks
from llmcache.execution.old_call import Call, Reuse
from llmcache.request.rows import Row
from llmcache.reuse.base import Rung
from llmcache.reuse.exact import Exact
from llmcache.reuse.paper import Paper
from llmcache.reuse.prefix.rung import Prefix
from llmcache.reuse.semantic import Semantic

__all__ = ["CacheBanks", "Call", "Exact", "Paper", "Prefix", "Reuse", "Row", "Rung", "Semantic"]
