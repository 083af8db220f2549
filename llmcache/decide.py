"""(3) From what a search found to what is reused: pure functions, no state, no I/O."""

from collections.abc import Collection, Mapping


def deepest_layer(similarity: float, tau: Mapping[int, float], held: Collection[int]) -> int | None:
    """The deepest layer whose bank holds the neighbour and whose threshold it reaches.

    The paper writes both `>` and `>=` for tau; this is `>=`.

    Args:
        similarity: To the nearest neighbour.
        tau: Threshold by layer; a layer without one never reuses.
        held: Layers whose bank still holds the neighbour.

    Returns:
        The layer, or None for a miss.
    """
    return max((layer for layer in held if layer in tau and similarity >= tau[layer]), default=None)


def thresholds(tau: float | Mapping[int, float] | None, layers: Collection[int], depth: int) -> dict[int, float]:
    """Spread the `tau` setting over the stored layers.

    Args:
        tau: One threshold, one a layer (negative layers count from the end), or None.
        layers: Stored layers.
        depth: Number of layers of the model.

    Returns:
        Threshold by stored layer; empty when nothing is reused approximately.

    Raises:
        ValueError: A threshold is given for a layer that is not stored.
    """
    if tau is None:
        return {}
    if isinstance(tau, Mapping):
        by_layer = {layer + depth if layer < 0 else layer: value for layer, value in tau.items()}
        if stray := sorted(set(by_layer) - set(layers)):
            raise ValueError(f"tau names layers {stray} that are not stored; stored: {sorted(layers)}")
        return by_layer
    return dict.fromkeys(layers, tau)
