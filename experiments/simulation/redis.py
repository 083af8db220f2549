"""A Redis as two queues: its one thread, and the link that its answers leave by. Both serve in the order of arrival."""

from experiments.simulation.times import Use


class Redis:
    """A server that is busy until a time that is known: what comes later waits until then."""

    def __init__(self, link_bytes_s: float) -> None:
        """Idle; its link takes so many bytes a second."""
        self._link_bytes_s = link_bytes_s
        self._free_s = self._link_free_s = 0.0
        self._used = Use()

    def ask(self, now_s: float, use: Use) -> tuple[float, float]:
        """How long it waits for its turn, and when it is answered."""
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + use.cpu_s
        self._link_free_s = max(self._free_s, self._link_free_s) + use.nbytes / self._link_bytes_s
        self._used += use
        return begin_s - now_s, self._link_free_s

    def figures(self, seconds: float) -> dict[str, float]:
        """What it did until an end, a second."""
        late_s, link_late_s = max(0.0, self._free_s - seconds), max(0.0, self._link_free_s - seconds)
        return {
            "redis_busy": (self._used.cpu_s - late_s) / seconds,
            "link_busy": max(0.0, self._used.nbytes / self._link_bytes_s - link_late_s) / seconds,
            "redis_ops_s": self._used.ops / seconds,
            "redis_mb_s": self._used.nbytes / 1e6 / seconds,
        }
