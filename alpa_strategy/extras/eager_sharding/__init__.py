"""Sharded parameters under eager code (ZeRO-2 and ZeRO-3): each is gathered when it is used."""
