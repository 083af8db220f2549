"""Figures of LLMCache (Bansal 2025) that are tested here. They are claims, and nothing is tuned to them."""

from collections.abc import Mapping

#: Table 1: milliseconds at batch 1 and 128 tokens without a cache and with the paper's, by architecture and
#: head as they are called here.
MS: Mapping[tuple[str, str], tuple[float, float]] = {
    ("bert-base", "class"): (218.6, 91.3),
    ("distilbert", "class"): (123.4, 57.9),
    ("gpt2", "token"): (304.8, 112.5),
}
HARDWARE = "an NVIDIA A100"  # where its times were taken
SPEEDUP = 3.1  # at most
DROP = 0.005  # of accuracy, at most: half a point
HIT_RATE = 0.92  # figure 3, in low and middle layers, at most
TAUS = (0.82, 0.88)  # figure 5: between them lie the best thresholds
