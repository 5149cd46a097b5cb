"""What is this model? The only room that knows model structure."""

from .blocks import Anatomy, BlockStack, Stream, find_anatomy
from .components import ModuleDiscovery, PipelineModules, SupportsModuleOffload, find_denoisers
from .coverage import Coverage, coverage
from .declarations import BlockDeclaration, register_declaration
from .probe import probe_anatomy, probe_pipeline
from .survey import ModelReport, survey, survey_by_running, survey_pipeline

__all__ = [
    "Anatomy",
    "BlockDeclaration",
    "BlockStack",
    "Coverage",
    "ModelReport",
    "ModuleDiscovery",
    "PipelineModules",
    "Stream",
    "SupportsModuleOffload",
    "coverage",
    "find_anatomy",
    "find_denoisers",
    "probe_anatomy",
    "probe_pipeline",
    "register_declaration",
    "survey",
    "survey_by_running",
    "survey_pipeline",
]
