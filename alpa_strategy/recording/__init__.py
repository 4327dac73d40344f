"""Tensors without memory: the ops that would compute them are recorded, and run when needed.

The core does not use it: deferred init (`extras/deferred_init.py`) and `hf/` do.
"""
