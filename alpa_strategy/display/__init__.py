"""What a user sees: the plan as a table or a picture, progress while planning, predicted against measured."""

from alpa_strategy.display.progress import Progress, peak_rss_bytes
from alpa_strategy.display.table import measured_line, plan_html, plan_svg, plan_table, plan_timing

__all__ = [
    "Progress",
    "measured_line",
    "peak_rss_bytes",
    "plan_html",
    "plan_svg",
    "plan_table",
    "plan_timing",
]
