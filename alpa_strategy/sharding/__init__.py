"""Sharding rules: what an op can do on a mesh axis, and what one device then runs."""

from alpa_strategy.sharding.rule_table import has_rule
from alpa_strategy.sharding.strategies import axis_strategies, localize, op_strategies, rule_origin

__all__ = ["axis_strategies", "has_rule", "localize", "op_strategies", "rule_origin"]
