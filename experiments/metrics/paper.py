"""Figures of LLMCache (Bansal 2025) that are tested here. They are claims; nothing is tuned to them."""

from collections.abc import Mapping

#: Table 1: ms at batch 1 and 128 tokens without a cache and with the paper's, by architecture and head as named here.
MS: Mapping[tuple[str, str], tuple[float, float]] = {
    ("bert-base", "class"): (218.6, 91.3),
    ("distilbert", "class"): (123.4, 57.9),
    ("gpt2", "token"): (304.8, 112.5),
}
HARDWARE = "an NVIDIA A100"  # hardware of its times
SPEEDUP = 3.1  # at most
DROP = 0.005  # of accuracy, at most: half a point
HIT_RATE = 0.92  # figure 3, in low and middle layers, at most
TAUS = (0.82, 0.88)  # figure 5: the range of the best thresholds
CURVE = ("llmcache", "mean")  # method and fingerprint of its main figures
