"""What a response's headers tell of how it came about: nothing, unless the operator has asked for it."""

from collections.abc import Sequence

from llmcache.serving.encoder import Output
from llmcache.serving.server import Server


def headers(server: Server, outputs: Sequence[Output]) -> dict[str, str]:
    """How many inputs were served from the cache, and where time went: which tells who asks what was asked before."""
    if not server.settings.reveal_hits:
        return {}
    rungs = [one.rung for one in outputs if one.rung is not None]
    return {
        "X-Cache": "HIT" if len(rungs) == len(outputs) else "PARTIAL" if rungs else "MISS",
        "X-Cache-Hits": str(len(rungs)),
        "X-Cache-Rung": ",".join(dict.fromkeys(rungs)) or "none",
        "X-Compute-Tokens": str(sum(one.n_tokens for one in outputs)),
        "X-Queue-Time": f"{1e3 * max(one.queue_s for one in outputs):.3f}",
        "X-Inference-Time": f"{1e3 * max(one.compute_s for one in outputs):.3f}",
    }
