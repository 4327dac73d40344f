"""The extra at its hook point."""

from alpa_strategy.extras.host_allocator.allocator import enforce_memory_plan, keep_freed, trim
from alpa_strategy.extras.host_allocator.page_faults import with_page_faults

__all__ = ["enforce_memory_plan", "keep_freed", "trim", "with_page_faults"]
