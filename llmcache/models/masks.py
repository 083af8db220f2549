"""4-D attention masks that are equal to a 2-D mask: `generate()` makes them for K/V caches of fixed length.

Sizes: B rows, T tokens, M keys that the mask has columns for (M >= T).
"""

from typing import Any

import torch
from torch import Tensor

from llmcache.models.adapters import CACHE


def flatten(arguments: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """Replace a 4-D mask by the 2-D mask that it may come from. Reads no tensor's values.

    Returns the arguments, and the 4-D mask, bool (B, 1, T, M), to be compared with `expand`; None if there is none.
    """
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    if isinstance(mask, dict) and len(mask) == 1:  # masks by kind of layer; all layers are of one kind
        (mask,) = mask.values()
        if mask is None:  # generate() found that all tokens are valid
            return {**arguments, "attention_mask": None}, None
    if not (isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == torch.bool):
        return arguments, None
    if arguments.get(CACHE) is None or not isinstance(ids, Tensor) or ids.ndim != 2:
        return arguments, None
    n_rows, n_tokens = ids.shape
    if n_tokens == 0 or mask.shape[:3] != (n_rows, 1, n_tokens) or mask.shape[3] < n_tokens:
        return arguments, None
    return {**arguments, "attention_mask": mask[:, 0, -1, :n_tokens]}, mask  # the last token sees all valid ones


def cut(mask: Any, n_cut: int) -> Any:
    """Return a 4-D mask without the rows of the first `n_cut` tokens; `mask`: a tensor, or a dict by kind of layer."""
    return {kind: cut(one, n_cut) for kind, one in mask.items()} if isinstance(mask, dict) else mask[:, :, n_cut:]


def expand(valid: Tensor, n_keys: int) -> Tensor:
    """Return the causal mask, bool (B, 1, T, M), for valid tokens, bool (B, T)."""
    n_tokens = valid.shape[1]
    causal = torch.ones(n_tokens, n_keys, dtype=torch.bool, device=valid.device).tril()
    return causal & torch.nn.functional.pad(valid, (0, n_keys - n_tokens))[:, None, None, :]
