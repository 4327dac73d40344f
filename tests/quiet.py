"""Trainer arguments of tests that look at neither logs, checkpoints nor the screen."""

from __future__ import annotations

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
