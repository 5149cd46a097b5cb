"""What a model is made of, read from its structure, without running it."""

from .blocks import Anatomy, BlockStack, Coverage, Stream, coverage, find_anatomy
from .components import ModuleDiscovery, PipelineModules, SupportsModuleOffload, find_denoisers
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
