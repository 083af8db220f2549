"""Models and data of the hub, asked for in silence and, where they cannot be had, once."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

#: Why, by source: the runs of a sweep ask for the same ones, and the hub's client tries each for most of a minute.
FAILED: dict[str, str] = {}


@contextmanager
def asking(source: str) -> Iterator[None]:
    """Within: something is loaded from the hub. This process asks once for what could not be had.

    Args:
        source: Name of the model or data set on the hub.

    Raises:
        OSError: It could not be had, now or before.
    """
    if source in FAILED:
        raise OSError(FAILED[source])
    with quiet():
        try:
            yield
        except OSError as error:
            FAILED[source] = cause(error)
            raise


@contextmanager
def quiet() -> Iterator[None]:
    """Let transformers and the hub report nothing but errors and draw no bars: what matters of it is raised here."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    level, hub_level = logging.get_verbosity(), hub_logging.get_verbosity()
    has_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if has_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def cause(error: Exception) -> str:
    """The first sentence of what a library says of an error, in one line; what follows is advice for its own users."""
    first: str = re.split(r"\n|(?<=[.!?])\s", str(error).strip())[0]
    return first.strip().rstrip(".") or type(error).__name__
