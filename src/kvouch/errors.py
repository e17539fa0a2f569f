"""Every error that kvouch raises on purpose. Knows messages and exit statuses; knows nothing of what failed.

KvouchError
├── UsageError              the call is wrong (exit status 2)
│   ├── InvalidIds          token ids that are empty, not integers, or outside the vocabulary
│   ├── ContextOverflow     more positions than the model or the cache has
│   ├── UnknownModel        a name that no catalogue, directory or hub answers to
│   └── UnknownAdapter      a name under which no adapter is loaded, or no longer
├── ArtefactError           the files of a model are wrong
│   ├── FileError           missing, empty, truncated, unreadable, or behind a link that is not followed
│   ├── ConfigError         a config field that contradicts, is missing, or computes something unsupported
│   ├── TensorError         tensors missing, left over, or of the wrong shape
│   ├── ManifestMismatch    files that are not those of a manifest
│   └── AdapterError        an adapter for another base, or with an option that is not supported
├── DownloadError           a model could not be had; lists what was tried
├── MissingExtra            an optional dependency is not installed; names the extra
├── CacheError              a cache was asked for what it cannot do; it stays usable
│   ├── CacheShapeError     batch, heads, head size, dtype or device do not fit
│   ├── CacheOverflow       an update past the capacity
│   ├── PoolFull            fewer free blocks than an operation needs
│   └── CacheMisuse         layers updated unequally, a rollback out of range, use after release
├── IdentityError           an identity, or the root of a key, that is none
├── StateDiverged           an audit: reused state is not what computing it anew gives
└── NonFinite               the computation gave an infinity or a NaN; nothing was kept
"""


class KvouchError(Exception):
    """Base of every error raised on purpose; its text is one line fit to show a user."""

    exit_status = 1


class UsageError(KvouchError):
    """The call is wrong: an argument, a prompt, a name."""

    exit_status = 2


class InvalidIds(UsageError):
    """Token ids that are empty, not integers, or outside the vocabulary."""


class ContextOverflow(UsageError):
    """More positions were asked for than the model or the cache has."""


class UnknownModel(UsageError):
    """A name that is in no catalogue, names no directory, and is no hub id."""


class UnknownAdapter(UsageError):
    """No adapter is loaded under this name, or no longer."""


class ArtefactError(KvouchError):
    """The files of a model are wrong."""


class FileError(ArtefactError):
    """A file is missing, empty, truncated, unreadable, or behind a link that is not followed."""


class ConfigError(ArtefactError):
    """A config field contradicts the tensors, is missing, or computes something unsupported."""


class TensorError(ArtefactError):
    """Tensors are missing, left over, or of the wrong shape."""


class ManifestMismatch(ArtefactError):
    """A directory's files are not those of the manifest that it was checked against."""


class AdapterError(ArtefactError):
    """An adapter is for another base, or asks for something that is not supported."""


class DownloadError(KvouchError):
    """A model could not be had; the text lists what was tried."""


class MissingExtra(KvouchError):
    """An optional dependency is not installed; the text names the extra."""


class CacheError(KvouchError):
    """A cache was asked for what it cannot do; it stays as it was."""


class CacheShapeError(CacheError):
    """Batch, heads, head size, dtype or device do not fit the cache."""


class CacheOverflow(CacheError):
    """An update would go past the capacity."""


class PoolFull(CacheError):
    """An operation needs more blocks than are free; nothing was done."""


class CacheMisuse(CacheError):
    """Layers were updated unequally, a rollback is out of range, or the cache was released."""


class IdentityError(KvouchError):
    """An identity, or the root of a key, is none."""


class StateDiverged(KvouchError):
    """An audit found that reused state is not what computing it anew gives; the text says where it first differs.

    `divergence` is where, `held` and `computed` are the two identities.
    """

    def __init__(self, text: str, *, divergence: object, held: object, computed: object) -> None:
        super().__init__(text)
        self.divergence, self.held, self.computed = divergence, held, computed


class NonFinite(KvouchError):
    """The computation gave an infinity or a NaN; nothing was kept. `cache` is that of the sequence, in a batch."""

    cache: object = None
