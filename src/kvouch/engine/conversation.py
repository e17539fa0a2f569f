"""A chat as ids: each turn goes behind all turns before it, whose ids are never encoded again.

What the model wrote stays as the ids that it chose: their text, encoded, could give other ids. What the template puts
between an answer and the next one is found by rendering the chat with a sentinel in the answer's place, and only that
is encoded. Where the template rewrites earlier turns there is no such text, and the whole chat is encoded; the
backend's verdict then says where the ids differ. Knows text and ids; knows no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from kvouch.errors import UsageError
from kvouch.loader.chat_template import Message
from kvouch.loader.tokenizer import Tokenizer

SENTINEL = "kvouch0answer"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The messages so far, their ids, and the rendered text that the last answer was asked with."""

    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()
    prompt: str = ""

    @classmethod
    def begin(cls, system: str | None = None) -> Self:
        return cls(messages=() if system is None else ({"role": "system", "content": system},))

    def asked(self, text: str, tokenizer: Tokenizer) -> Self:
        """The conversation with one more question; its ids are the prompt of the answer."""
        if not text.strip():
            raise UsageError("the question is empty")
        messages = (*self.messages, {"role": "user", "content": text})
        prompt = tokenizer.render(messages, add_generation_prompt=True)
        follows_answer = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        between = self._between(messages, prompt, tokenizer) if follows_answer else None
        if between is None:
            ids = tuple(tokenizer.encode(prompt, special=False))
        else:
            ids = (*self.ids, *tokenizer.encode(between, special=False))
        return replace(self, messages=messages, ids=ids, prompt=prompt)

    def answered(self, ids: Sequence[int], text: str) -> Self:
        """The conversation with the answer; `ids` are the chosen ones without the stop id, which the template has."""
        messages = (*self.messages, {"role": "assistant", "content": text})
        return replace(self, messages=messages, ids=(*self.ids, *ids))

    def _between(self, messages: Sequence[Message], prompt: str, tokenizer: Tokenizer) -> str | None:
        """The text from the end of the last answer to the start of the next; None where earlier text is rewritten.

        It is trusted only if `prompt`, rendered with the answer's real text, is the same but for white space at the
        answer's ends, which templates strip.
        """
        *_, answer, _ = messages
        sentinel = SENTINEL
        while any(sentinel in message["content"] for message in messages):
            sentinel += "0"
        stand_in = [*messages[:-2], {**answer, "content": sentinel}, messages[-1]]
        rendered = tokenizer.render(stand_in, add_generation_prompt=True)
        before, found, after = rendered.partition(sentinel)
        if not found or sentinel in after or before != self.prompt:
            return None
        middle = prompt[len(before) : len(prompt) - len(after)]
        whole = before + middle + after == prompt
        return after if whole and middle.strip() == answer["content"].strip() else None
