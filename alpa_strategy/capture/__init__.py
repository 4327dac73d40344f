"""Capture: from a LightningModule's own training_step to a StepGraph
(`alpa_strategy.capture.capture.capture_step`).
"""
