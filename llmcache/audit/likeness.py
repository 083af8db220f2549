"""Whether requests are still like those of the calibration, told from how many of them find somebody to serve them.

A certificate is about requests that are drawn like those it was measured on. What they mean nobody can see for certain,
but a stream that has moved on (new topics, another language, other users) is served more seldom, or oftener. So the
share of requests that the calibration's sources serve is compared, window by window, with that on C.
"""

from math import sqrt

WINDOW = 500  # requests of one comparison
_LARGEST = 5.0  # standard errors by which shares of like requests differ in one comparison of 1.7 million


class Likeness:
    """Compares hit rates for one calibration. The caller holds a lock."""

    def __init__(self, share: float, n: int) -> None:
        """Begin a window.

        Args:
            share: Of the requests of C, those that would be served, 0 to 1.
            n: How many requests C has.
        """
        self._share = share
        self._n = n
        self._seen = 0
        self._hits = 0

    def see(self, n_requests: int, n_hits: int) -> bool:
        """Take in requests, and how many of them the sources serve; whether the window that they end is unlike C."""
        self._seen += n_requests
        self._hits += n_hits
        if self._seen < WINDOW:
            return False
        share, self._seen, self._hits, n = self._hits / self._seen, 0, 0, self._seen
        mean = (n * share + self._n * self._share) / (n + self._n)
        error = sqrt(mean * (1 - mean) * (1 / n + 1 / self._n))
        return abs(share - self._share) > _LARGEST * error
