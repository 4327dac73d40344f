"""Sharding rules: what an op can do on a mesh axis, and what one device then runs."""
