"""Eager steps that call planned programs as the forwards of submodules."""
