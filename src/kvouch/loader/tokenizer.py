"""Text to ids and back, stop ids, chat prompts. Knows tokenizer.json and the files beside it; knows no tensor.

Only tokenizer.json is read, through `ArtefactFiles`: no pickle, no tokenizer.model.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from kvouch.artefact.files import ArtefactFiles
from kvouch.errors import ConfigError, FileError, UsageError
from kvouch.loader.chat_template import ChatTemplate, Message

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
HALF_CHARACTER = "\ufffd"  # what a decoder gives for bytes that are not yet, or never, a character
CONTEXT_IDS = 16  # enough ids before an answer to know whether its first word follows a space


class Tokenizer:
    """The tokenizer of one model, with what ends its answers and how it lays out a chat."""

    def __init__(
        self, core: tokenizers.Tokenizer, *, where: str, stop_ids: frozenset[int], template: ChatTemplate | None
    ) -> None:
        self._core, self._where, self._template = core, where, template
        self.stop_ids = stop_ids

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; with `special`, what the tokenizer puts around a plain prompt (BOS, once) is added.

        A rendered chat holds its special tokens already: encode it with `special=False`. UsageError for a text that
        is not Unicode (a lone surrogate, as undecodable bytes of an argument become).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not UTF-8 (character {error.start})") from error
        encoding = self._core.encode(text, add_special_tokens=special)
        ids, added = list(encoding.ids), encoding.special_tokens_mask  # 1 for what was put around the text
        begins_with_it = len(ids) > 1 and added[0] == 1 and added[1] == 0 and ids[0] == ids[1]
        return ids[1:] if begins_with_it else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._core.decode(list(ids), skip_special_tokens=skip_special)

    def stream(self, context: Sequence[int] = ()) -> "TextStream":
        """Text of ids that come one at a time, after the ids of `context`."""
        return TextStream(self._core, context)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a chat as the model's template lays it out; ConfigError where there is none or it fails."""
        if self._template is None:
            raise ConfigError(
                f"{self._where}: no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
                "this model only continues text: use `kvouch generate`"
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)


class TextStream:
    """Text of ids that come one at a time, in whole characters: what is incomplete waits for the next id."""

    def __init__(self, core: tokenizers.Tokenizer, context: Sequence[int] = ()) -> None:
        self._core = core
        before = list(context[-CONTEXT_IDS:])
        if core.decode(before).endswith(HALF_CHARACTER):  # the stream would give out the context's text as well
            before = []
        self._stream = DecodeStream(ids=before, skip_special_tokens=True)
        self._waiting: list[int] = []

    def step(self, token_id: int) -> str:
        """The text that this id completes; special tokens have none."""
        try:
            text = self._stream.step(self._core, token_id)
        except Exception:  # bytes that were a character no longer are with this one: begin anew behind them
            self._stream = DecodeStream(skip_special_tokens=True)
            text = self._stream.step(self._core, token_id)
        self._waiting = [] if text is not None else [*self._waiting, token_id]
        return text or ""

    def finish(self) -> str:
        """The whole characters among what still waits; half a character is dropped."""
        waiting, self._waiting = self._waiting, []
        return self._core.decode(waiting, skip_special_tokens=True).rstrip(HALF_CHARACTER)


def load_tokenizer(
    files: ArtefactFiles, config: Mapping[str, Any], *, now: Callable[[], datetime] = datetime.now
) -> Tokenizer | None:
    """The tokenizer of a model directory, or None where it has no tokenizer.json; `config` is its config.json.

    `now` is the clock of templates that print the date. Raises FileError and ConfigError.
    """
    if not files.exists("tokenizer.json"):
        return None
    where = str(files.directory)
    core = _core(files.text("tokenizer.json"), f"{where}/tokenizer.json")
    size = max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > config["vocab_size"]:
        raise ConfigError(
            f"{where}: tokenizer.json has ids up to {size - 1}, but vocab_size in config.json is "
            f"{config['vocab_size']}: the model has no embedding for them"
        )
    fields = files.json("tokenizer_config.json") if files.exists("tokenizer_config.json") else {}
    special_tokens = _special_tokens(fields, f"{where}/tokenizer_config.json")
    source = _template_source(files, fields)
    template = ChatTemplate(source, where, special_tokens=special_tokens, now=now) if source is not None else None
    stop_ids = _stop_ids(files, config, special_tokens, core)
    return Tokenizer(core, where=where, stop_ids=stop_ids, template=template)


def _core(text: str, where: str) -> tokenizers.Tokenizer:
    try:
        core = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise FileError(f"{where}: not a tokenizer that this version of `tokenizers` reads ({error})") from error
    core.no_truncation()  # a file can carry both, and either would change ids in silence
    core.no_padding()
    return core


def _special_tokens(fields: Mapping[str, Any], where: str) -> dict[str, str]:
    """Special tokens by name; each is a string, or an object that holds it as `content`."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = fields.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text is None:
            continue
        if not isinstance(text, str):
            raise ConfigError(f"{where}: {name} is {token!r}; a string is needed")
        found[name] = text
    return found


def _template_source(files: ArtefactFiles, fields: Mapping[str, Any]) -> str | None:
    if files.exists("chat_template.jinja"):
        return files.text("chat_template.jinja")
    found = fields.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        if "default" not in named:
            raise ConfigError(f"{files.directory}/tokenizer_config.json: chat_template has no 'default' among its list")
        found = named["default"]
    if found is not None and not isinstance(found, str):
        raise ConfigError(f"{files.directory}/tokenizer_config.json: chat_template is no string")
    return found


def _stop_ids(
    files: ArtefactFiles, config: Mapping[str, Any], special_tokens: Mapping[str, str], core: tokenizers.Tokenizer
) -> frozenset[int]:
    """What ends an answer: generation_config.json, else config.json; and the tokenizer's own eos_token."""
    origin, found = "generation_config.json", None
    if files.exists(origin):
        found = files.json(origin).get("eos_token_id")
    if found is None:
        origin, found = "config.json", config.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for one in ids:
        if type(one) is not int or not 0 <= one < config["vocab_size"]:
            raise ConfigError(
                f"{files.directory}/{origin}: eos_token_id is {one!r}; an id in [0, {config['vocab_size']}) is needed"
            )
    text = special_tokens.get("eos_token")
    if text is None:
        return frozenset(ids)
    eos = core.token_to_id(text)
    if eos is None:
        raise ConfigError(f"{files.directory}/tokenizer_config.json: eos_token {text!r} is not in tokenizer.json")
    return frozenset(ids) | {eos}
