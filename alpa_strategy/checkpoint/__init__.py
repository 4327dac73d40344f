"""Sharded checkpoints: written by all ranks through torch.distributed.checkpoint, readable under
any other plan.
"""
