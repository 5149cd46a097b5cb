"""Runs models without side effects: forwards watched, skipped, and run without weights. Knows whether they changed."""

from .probe import probe_anatomy
from .reports import ModelReport, survey, survey_pipeline

__all__ = ["ModelReport", "probe_anatomy", "survey", "survey_pipeline"]
