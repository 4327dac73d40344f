"""Loading much code and planning, with fewer collections of cyclic garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Context of imports: Python's cyclic garbage is not collected in it.

    Importing makes many objects and hardly any garbage. With torch and Lightning loaded, the
    collection of all generations that this would bring takes longer than the imports.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Context of planning: cyclic garbage is collected rarely.

    This saves a sixth of the time of a large plan, and more of a small step's first start.
    """
    thresholds = gc.get_threshold()
    was_frozen = gc.get_freeze_count() > 0
    # Imported objects are many, and never garbage. What the user has frozen stays so.
    if not was_frozen:
        gc.freeze()
    gc.set_threshold(100_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not was_frozen:
            gc.unfreeze()
