"""What is this model made of? Read from structure, without running anything."""

from .blocks import Anatomy, BlockStack, Stream, find_anatomy
from .components import ModuleDiscovery, PipelineModules, SupportsModuleOffload, find_denoisers
from .coverage import Coverage, coverage
from .declarations import BlockDeclaration, register_declaration

__all__ = [
    "Anatomy",
    "BlockDeclaration",
    "BlockStack",
    "Coverage",
    "ModuleDiscovery",
    "PipelineModules",
    "Stream",
    "SupportsModuleOffload",
    "coverage",
    "find_anatomy",
    "find_denoisers",
    "register_declaration",
]
