"""The tokenizer of a GGUF as `tokenizer.json`. Knows byte-level BPE and how two families split text; reads no file.

A GGUF names its way of splitting text (`tokenizer.ggml.pre`) without describing it. A name that is not in PRE is
refused: another split gives other ids for the same text, silently.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvouch.errors import ConfigError

Fields = Mapping[str, Any]


def _smollm() -> pre_tokenizers.PreTokenizer:
    """As in SmolLM's own tokenizer.json: every digit is a token of its own."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)


PRE: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {"smollm": _smollm, "gpt-2": _gpt2}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}
MUST_BE_OFF = ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix")


def build_tokenizer(fields: Fields) -> Tokenizer:
    """The tokenizer; ConfigError names the GGUF field that is not understood."""
    if fields.get("tokenizer.ggml.model") != "gpt2":
        found = fields.get("tokenizer.ggml.model")
        raise ConfigError(f"GGUF field tokenizer.ggml.model: found {found!r}, and only 'gpt2' is converted")
    split = str(fields.get("tokenizer.ggml.pre"))
    if split not in PRE:
        raise ConfigError(f"GGUF field tokenizer.ggml.pre: found {split!r}, known are {', '.join(PRE)}")
    for name in MUST_BE_OFF:
        if fields.get(f"tokenizer.ggml.{name}", False):
            raise ConfigError(f"GGUF field tokenizer.ggml.{name}: it is on, which is not converted")
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(fields), merges=_merges(fields)))
    tokenizer.pre_tokenizer = PRE[split]()
    tokenizer.decoder = decoders.ByteLevel()
    special, others = _added(fields)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(others)
    return tokenizer


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    """`tokenizer_config.json`: which tokens are special, and the class that reads any tokenizer.json as it is."""
    tokens = _tokens(fields)
    special = {name: tokens[fields[field]] for name, field in SPECIAL.items() if field in fields}
    length = {"model_max_length": fields["llama.context_length"]} if "llama.context_length" in fields else {}
    return {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **length,
        **special,
    }


def _tokens(fields: Fields) -> list[str]:
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError("GGUF field tokenizer.ggml.tokens: missing or empty")
    return tokens


def _vocabulary(fields: Fields) -> dict[str, int]:
    tokens = _tokens(fields)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConfigError("GGUF field tokenizer.ggml.tokens: a token appears twice")
    return vocabulary


def _merges(fields: Fields) -> list[tuple[str, str]]:
    merges = []
    for merge in fields.get("tokenizer.ggml.merges", ()):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ConfigError(f"GGUF field tokenizer.ggml.merges: {merge!r} is not two tokens and a space")
        merges.append((left, right))
    return merges


def _added(fields: Fields) -> tuple[list[AddedToken], list[AddedToken]]:
    """The tokens that are never split, control tokens and others, each in the order of ids."""
    tokens, kinds = _tokens(fields), fields.get("tokenizer.ggml.token_type", [])
    if len(kinds) != len(tokens):
        raise ConfigError(f"GGUF field tokenizer.ggml.token_type: {len(kinds)} types for {len(tokens)} tokens")
    if unknown := set(kinds) - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED}:
        raise ConfigError(f"GGUF field tokenizer.ggml.token_type: found {sorted(unknown)}, which is not converted")
    special = [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    others = [
        AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED
    ]
    return special, others
