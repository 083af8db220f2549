"""What a model's head reads of the last layer, and so what an entry must keep.

Reusing the whole output of a layer returns the answer of the request it was stored for: every later layer is a function
of that output alone. A pooled head (class, score, embedding) may accept that for a request that means the same. A head
that answers token by token may not: start and end positions would index another text.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from llmcache.models.adapters import is_from
from llmcache.models.pooling import Pooled, find_pooled

#: One vector a request; an answer per token (span, tag, language model); unknown, so all hidden states.
Reads = Literal["pooled", "tokens", "states"]
PayloadName = Literal["sequence", "cls", "last", "mean"]


@dataclass(frozen=True, slots=True)
class Head:
    """A head by what it reads."""

    name: str  # in errors
    reads: Reads
    payload: PayloadName = "sequence"  # the least that serves it
    why_unsafe: str = ""  # why another request's states must not be put under it, or ""
    pooled: Pooled | None = None  # what under sentence-transformers reads one vector of the states


_BY_TOKEN = (
    "It answers token by token, so the answer would be the other request's: start and end positions of another text, "
    "next words of another sentence."
)
_TWO_SIDES = "Its decoder reads its own tokens beside the encoder's states, which must belong together."


# Class-name endings, first match wins.
_ENDINGS: tuple[tuple[str, str, Reads], ...] = (
    ("ForQuestionAnswering", "span head", "tokens"),
    ("ForTokenClassification", "token head", "tokens"),
    ("ForMaskedLM", "masked language-model head", "tokens"),
    ("ForPreTraining", "pre-training head", "tokens"),
    ("ForCausalLM", "language-model head", "tokens"),
    ("LMHeadModel", "language-model head", "tokens"),
    ("DoubleHeadsModel", "language-model head", "tokens"),
    ("ForConditionalGeneration", "language-model head", "tokens"),
    ("ForSequenceClassification", "classifier", "pooled"),
    ("ForMultipleChoice", "multiple-choice head", "pooled"),
    ("ForNextSentencePrediction", "next-sentence head", "pooled"),
)
_READS_FIRST_ROW = ("bert", "roberta", "distilbert", "electra")
_READS_LAST_ROW = ("gpt2", "llama")


def find_head(model: nn.Module, family: str) -> Head:
    """Classify the head of a model by its class, or of a sentence-transformers model by its pooling."""
    for module in model.modules():
        if type(module).__name__ == "Pooling" and is_from(module, "sentence_transformers"):
            pooled = find_pooled(model)
            return Head("sentence embedding", "pooled", "sequence" if pooled is None else pooled.kept, pooled=pooled)
    for module in model.modules():
        if not is_from(module, "transformers"):
            continue  # a user's own class of such a name may read anything
        for ending, name, reads in _ENDINGS:
            if type(module).__name__.endswith(ending):
                if reads == "pooled" and getattr(getattr(module, "config", None), "is_encoder_decoder", False):
                    return Head(f"encoder-decoder's {name}", "tokens", why_unsafe=_TWO_SIDES)
                if reads == "tokens":
                    return Head(name, reads, why_unsafe=_BY_TOKEN)
                return Head(name, reads, _pooled_payload(family))
    for module in model.modules():
        if hasattr(module, "decoder") and getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            return Head("decoder beside the encoder", "tokens", why_unsafe=_TWO_SIDES)
    return Head("hidden states", "states")


def _pooled_payload(family: str) -> PayloadName:
    if family in _READS_FIRST_ROW:
        return "cls"
    return "last" if family in _READS_LAST_ROW else "sequence"
