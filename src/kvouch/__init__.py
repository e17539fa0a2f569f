"""kvouch reuses the keys and values of causal language models only when it can say why they are valid."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvouch.artefact.manifest import Manifest as Manifest
    from kvouch.cache.concat import ConcatCache as ConcatCache
    from kvouch.cache.paged import PagedCache as PagedCache
    from kvouch.cache.pool import BlockPool as BlockPool
    from kvouch.cache.sizing import cache_bytes as cache_bytes
    from kvouch.cache.static import StaticCache as StaticCache
    from kvouch.contract import Hit as Hit
    from kvouch.contract import Miss as Miss
    from kvouch.contract import Refused as Refused
    from kvouch.engine.audit import AuditedBackend as AuditedBackend
    from kvouch.engine.backend import CachedBackend as CachedBackend
    from kvouch.engine.backend import RollbackBackend as RollbackBackend
    from kvouch.engine.backend import UncachedBackend as UncachedBackend
    from kvouch.engine.batch import BatchedBackend as BatchedBackend
    from kvouch.engine.batch import Prompt as Prompt
    from kvouch.engine.loop import generate_many as generate_many
    from kvouch.engine.model import Model as Model
    from kvouch.engine.model import load as load
    from kvouch.engine.transformers_backend import TransformersBackend as TransformersBackend
    from kvouch.identity.identity import Identity as Identity
    from kvouch.identity.keys import block_keys as block_keys
    from kvouch.identity.keys import prefix_key as prefix_key
    from kvouch.models.forward import forward_cached as forward_cached
    from kvouch.models.forward import forward_many as forward_many

_EXPORTS = {
    "AuditedBackend": "kvouch.engine.audit",
    "BatchedBackend": "kvouch.engine.batch",
    "BlockPool": "kvouch.cache.pool",
    "CachedBackend": "kvouch.engine.backend",
    "ConcatCache": "kvouch.cache.concat",
    "Hit": "kvouch.contract",
    "Identity": "kvouch.identity.identity",
    "Manifest": "kvouch.artefact.manifest",
    "Miss": "kvouch.contract",
    "Model": "kvouch.engine.model",
    "Refused": "kvouch.contract",
    "PagedCache": "kvouch.cache.paged",
    "Prompt": "kvouch.engine.batch",
    "RollbackBackend": "kvouch.engine.backend",
    "StaticCache": "kvouch.cache.static",
    "TransformersBackend": "kvouch.engine.transformers_backend",
    "UncachedBackend": "kvouch.engine.backend",
    "block_keys": "kvouch.identity.keys",
    "cache_bytes": "kvouch.cache.sizing",
    "forward_cached": "kvouch.models.forward",
    "forward_many": "kvouch.models.forward",
    "generate_many": "kvouch.engine.loop",
    "load": "kvouch.engine.model",
    "prefix_key": "kvouch.identity.keys",
}
__all__ = sorted(_EXPORTS)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: `import kvouch` does not import torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvouch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
