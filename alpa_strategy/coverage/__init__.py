"""How much of PyTorch the sharding rules cover, by experiment on PyTorch's own operator database."""
