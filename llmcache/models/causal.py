"""What a trunk does with a row's later tokens, its padding, and K/V of earlier calls."""

from dataclasses import dataclass

from transformers import DynamicCache


@dataclass(frozen=True, slots=True)
class Causal:
    """What a trial of a trunk has shown. By default nothing.

    Attributes:
        is_causal: A later token does not change the states of earlier ones, and the trunk fills a `DynamicCache`: one
            column of K/V per token, in every layer.
        cuts: After a beginning whose K/V is known, the rest of a row has the states that it has in the whole row.
            Without `knows_padding`: if the call has no padding.
        packs: `run_segments` gives each segment the states that it has alone.
        of_segment: Token columns that a segment costs beside its own. If it does not pack, that is one more forward,
            measured; else 0.
        knows_padding: Tokens that the mask leaves out affect others only by their number, and not if positions are
            passed.
        counts_padding: They do so by their number.
        is_by_column: A token's position, if none is passed, is its column, padding included.
        copies: A K/V cache that keeps something else (states) can be copied after a beginning, and the copy continued
            with positions: the rest of a row without padding has the states that it has in the whole row.
        rotates: How `rotate` makes the keys of tokens at other positions, one of `LAYOUTS`; "" if it does not.
        own_cache: The class of K/V cache that it makes, and takes no other; None: it takes a `DynamicCache`.
        makes_dynamic_cache: It makes a `DynamicCache` of its config if it is passed no cache, and `use_cache` is True
            as passed, or else in its config; none if that is False.
        steps: Tokens after a K/V cache of its config, which may keep windows, have the states of the whole row.
        windows: By layer, to how many tokens a token attends, itself included; None: to all.
        reason: Why it does not cut, in words; "" if it does.
    """

    is_causal: bool = False
    cuts: bool = False
    packs: bool = False
    of_segment: int = 0
    copies: bool = False
    knows_padding: bool = False
    counts_padding: bool = True
    is_by_column: bool = True
    rotates: str = ""
    makes_dynamic_cache: bool = False
    own_cache: type[DynamicCache] | None = None
    steps: bool = False
    windows: tuple[int | None, ...] = ()
    reason: str = "it was not tried"


UNTRIED = Causal()
