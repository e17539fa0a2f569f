"""How much is measured: the full run and a quick one. Knows numbers only."""

from dataclasses import dataclass

from benchmarks.inputs import CONTEXT_TOKENS
from benchmarks.measure import Bound, Plan


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    rounds: int
    decode_contexts: dict[str, tuple[int, ...]]
    prefill_tokens: tuple[int, ...]
    warm_prefix: dict[str, int]
    warm_new_tokens: int
    text_prompt_tokens: int
    text_new_tokens: int
    check_tokens: int
    decode_bound: Bound
    prefill_bound: Bound
    warm_bound: Bound
    text_bound: Bound
    wall_floats: int
    wall_side: int
    trial_tokens: int
    longest_s: float
    repeats: int
    help_repeats: int

    def plan(self, model: str) -> Plan:
        return Plan(
            decode_contexts=self.decode_contexts[model],
            prefill_tokens=self.prefill_tokens,
            warm_prefix_tokens=self.warm_prefix[model],
            warm_new_tokens=self.warm_new_tokens,
            text_prompt_tokens=self.text_prompt_tokens,
            text_new_tokens=self.text_new_tokens,
            context_tokens=CONTEXT_TOKENS[model],
            decode_bound=self.decode_bound,
            trial_tokens=self.trial_tokens,
            longest_s=self.longest_s,
            prefill_bound=self.prefill_bound,
            warm_bound=self.warm_bound,
            text_bound=self.text_bound,
        )


FULL = Size(
    rounds=2,
    decode_contexts={"smollm2": (16, 128, 512, 960, 4000, 8000), "gpt2": (16, 128, 512, 960)},
    prefill_tokens=(512, 1024),
    warm_prefix={"smollm2": 1024, "gpt2": 512},
    warm_new_tokens=32,
    text_prompt_tokens=17,
    text_new_tokens=32,
    check_tokens=272,  # past the first edge of a tile
    decode_bound=Bound(least=3, most=16, seconds=0.9),
    prefill_bound=Bound(least=1, most=4, seconds=2.0),  # so a slow prefill has one sample a round
    warm_bound=Bound(least=1, most=8, seconds=0.9),
    text_bound=Bound(least=1, most=4, seconds=2.0),
    wall_floats=64 << 20,  # 256 MB: far beyond any cache
    wall_side=2048,
    trial_tokens=32,
    longest_s=30.0,  # GPT-2 in bf16 without bf16 instructions: transformers takes minutes for 1,024 positions
    repeats=3,
    help_repeats=10,
)
QUICK = Size(
    rounds=1,
    decode_contexts={"smollm2": (16, 40), "gpt2": (16, 40)},
    prefill_tokens=(32, 48),
    warm_prefix={"smollm2": 48, "gpt2": 32},
    warm_new_tokens=8,
    text_prompt_tokens=8,
    text_new_tokens=4,
    check_tokens=24,
    decode_bound=Bound(least=3, most=4, seconds=0.2),
    prefill_bound=Bound(least=3, most=3, seconds=0.0),
    warm_bound=Bound(least=3, most=3, seconds=0.0),
    text_bound=Bound(least=3, most=3, seconds=0.0),
    wall_floats=4 << 20,
    wall_side=256,
    trial_tokens=8,
    longest_s=30.0,
    repeats=1,
    help_repeats=3,
)
