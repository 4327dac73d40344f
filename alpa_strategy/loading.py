"""Loading much code at once, quicker."""

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
