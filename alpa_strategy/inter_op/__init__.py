"""Inter-op: layers, stages, micro-batches and schedules (docs/formulas.md#inter-op)."""
