"""kvouch reuses the keys and values of causal language models only when it can say why they are valid."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvouch.cache.concat import ConcatCache as ConcatCache
    from kvouch.cache.sizing import cache_bytes as cache_bytes
    from kvouch.cache.static import StaticCache as StaticCache
    from kvouch.engine.model import Model as Model
    from kvouch.engine.model import load as load
    from kvouch.models.forward import forward_cached as forward_cached

_EXPORTS = {
    "ConcatCache": "kvouch.cache.concat",
    "Model": "kvouch.engine.model",
    "StaticCache": "kvouch.cache.static",
    "cache_bytes": "kvouch.cache.sizing",
    "forward_cached": "kvouch.models.forward",
    "load": "kvouch.engine.model",
}
__all__ = sorted(_EXPORTS)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: `import kvouch` does not import torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvouch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
