"""What does a forward do? Watched, replayed and perturbed, for caches, plans over ranks and reports."""

from .probe import probe_anatomy, probe_pipeline
from .reports import ModelReport, survey, survey_by_running, survey_pipeline

__all__ = ["ModelReport", "probe_anatomy", "probe_pipeline", "survey", "survey_by_running", "survey_pipeline"]
