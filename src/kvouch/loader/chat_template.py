"""Chat templates: messages in, prompt text out. Knows jinja2's sandbox; knows no file and no token id.

A template is code from whoever made the model, so it runs in the immutable sandbox, with the settings and the few
names that transformers gives it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvouch.errors import ConfigError

Message = Mapping[str, str]
"""One turn of a chat: its `role` and its `content`."""


class ChatTemplate:
    """One template, compiled when it is first used."""

    def __init__(
        self, source: str, where: str, *, special_tokens: Mapping[str, str], now: Callable[[], datetime]
    ) -> None:
        self._source, self._where = source, where
        self._special_tokens = dict(special_tokens)
        self._now = now

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The prompt of these messages; ConfigError, in one line, for whatever goes wrong in the template."""
        try:
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,  # templates ask whether these two are defined, and transformers defines them
                documents=None,
                **self._special_tokens,
            )
        except Exception as error:  # a template can raise anything that an expression can
            text = " ".join(str(error).split()) or type(error).__name__
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ConfigError(f"{self._where}: the chat template fails: {line}{text}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: self._now().strftime(form)
        return environment.from_string(self._source)


class _Generation(Extension):
    """`{% generation %}` marks an answer for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
