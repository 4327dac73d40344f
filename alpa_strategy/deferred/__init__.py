"""Deferred initialisation: a module built without memory, its parameters made one at a time when they are asked for."""
