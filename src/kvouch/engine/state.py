"""Keys and values that know what they are: the cache, the ids that it holds, and the identity they were computed under.

Knows how to compare; computes nothing.
"""

from array import array
from dataclasses import dataclass, field

from kvouch.contract import KVCache, Reason
from kvouch.engine.prefix import common_length
from kvouch.identity.identity import Identity
from kvouch.identity.keys import pack_ids


@dataclass(kw_only=True)
class State:
    """A cache whose first len(ids) positions are those of `ids`, at every moment.

    Ids leave before their positions do and come after them, so that an interrupt between two lines cannot break it.
    """

    identity: Identity
    cache: KVCache
    ids: "array[int]" = field(default_factory=lambda: pack_ids([]))

    def keep(self, tokens: int) -> None:
        """Keeps the first `tokens` positions and gives the rest up."""
        del self.ids[tokens:]
        self.cache.rollback(tokens)

    def fork(self) -> "State":
        """An independent copy."""
        return State(identity=self.identity, cache=self.cache.fork(), ids=self.ids[:])


@dataclass(frozen=True, kw_only=True)
class Match:
    """How far a state fits what is asked, and why no further; the operator's reason is kept from the caller."""

    tokens: int
    reason: Reason
    operator_reason: Reason | None = None


def match(state: State, identity: Identity, asked: "array[int]") -> Match:
    """Compares identity first, then every id: nothing is believed of what was asked before."""
    if not state.ids:
        return Match(tokens=0, reason=Reason(cause="no entry"))
    if state.identity is not identity and (difference := state.identity.diff(identity)) is not None:
        if state.identity.salt != identity.salt:  # what another tenant has stored is no business of this one
            hidden = Reason(cause="identity", field="salt")
            return Match(tokens=0, reason=Reason(cause="no entry"), operator_reason=hidden)
        return Match(tokens=0, reason=Reason(cause="identity", field=difference.field))
    held = state.ids
    shared = common_length(held, asked)
    if shared < min(len(held), len(asked)):
        at = Reason(cause="ids differ", position=shared, cached_id=held[shared], asked_id=asked[shared])
        return Match(tokens=shared, reason=at)
    return Match(tokens=shared, reason=Reason(cause="held" if shared < len(asked) else "ids equal"))
