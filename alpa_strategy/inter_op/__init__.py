"""Inter-op: layers, stages, micro-batches and schedules (design section 8)."""
