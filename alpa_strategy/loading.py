"""Loading much code and planning, with fewer collections of cyclic garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects that start a collection in the context of planning; Python's default is 700.
PLANNING_THRESHOLD = 100_000

# Whether the user has frozen objects, as far as is known. To count many of them takes 0.1 s.
_user_freezes = False


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
    """Context of planning: cyclic garbage is collected rarely, and what exists before is frozen.
    Nothing changes if it is as rare already.

    This saves a sixth of the time of a large plan, and more of a small step's first start.
    """
    global _user_freezes
    if gc.get_threshold()[0] >= PLANNING_THRESHOLD:
        # Within another of these contexts, or as rarely by the wish of the user.
        yield
        return

    thresholds = gc.get_threshold()
    _user_freezes = _user_freezes or gc.get_freeze_count() > 0
    # Imported objects are many, and never garbage. What the user has frozen stays so.
    if not _user_freezes:
        gc.freeze()
    gc.set_threshold(PLANNING_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not _user_freezes:
            gc.unfreeze()
