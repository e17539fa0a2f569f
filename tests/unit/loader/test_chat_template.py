"""Chat templates: the same text as transformers, in a sandbox, with errors of one line."""

from datetime import datetime
from pathlib import Path

import pytest

from kvouch.artefact.files import ArtefactFiles
from kvouch.errors import ConfigError
from kvouch.loader.tokenizer import load_tokenizer
from tiny_tokenizer import END, byte_tokenizer, read_tokenizer, tiny_tokenizer, write_tokenizer

CHAT = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "  Ä question?\n"},
    {"role": "assistant", "content": "An answer."},
    {"role": "user", "content": "And?"},
]

TEMPLATES = {
    "blocks are trimmed": """
{%- for message in messages %}
    {% if message.role == 'user' %}
U: {{ message.content }}
    {% else %}
{{ message.role }}: {{ message['content'] | trim }}
    {% endif %}
{%- endfor %}
{% if add_generation_prompt %}
A:
{% endif %}
""",
    "special tokens": "{{ eos_token }}{{ bos_token is defined }}{{ messages[0].content }}{{ eos_token }}",
    "json without HTML": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "raise is defined": "{{ raise_exception is defined }}{{ strftime_now is defined }}{{ tools is defined }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_the_text_is_that_of_transformers(tmp_path: Path, name: str, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END)
    theirs.chat_template = TEMPLATES[name]
    wanted = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    ours = tiny_tokenizer(tmp_path, template=TEMPLATES[name])
    assert ours.render(CHAT, add_generation_prompt=prompt) == wanted


def test_the_date_comes_from_the_clock_that_is_given(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template="{{ strftime_now('%d %b %Y') }}")
    files = ArtefactFiles(tmp_path)
    tokenizer = load_tokenizer(files, {"vocab_size": 257}, now=lambda: datetime(2031, 7, 5))
    assert tokenizer is not None
    assert tokenizer.render(CHAT) == "05 Jul 2031"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('Roles must\nalternate') }}", "Roles must alternate"),
        ("{% for m in %}", "line 1: "),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_a_failing_template_is_one_line(tmp_path: Path, template: str, said: str) -> None:
    tokenizer = tiny_tokenizer(tmp_path, template=template)
    with pytest.raises(ConfigError, match=rf"the chat template fails: .*({said})") as caught:
        tokenizer.render(CHAT)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_template_cannot_change_the_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ConfigError):
        tiny_tokenizer(tmp_path, template="{{ messages[0].update(content='b') }}").render(messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_the_file_goes_before_the_config(tmp_path: Path) -> None:
    fields = {"chat_template": "from the config"}
    assert tiny_tokenizer(tmp_path / "both", template="from the file", fields=fields).render(CHAT) == "from the file"
    assert tiny_tokenizer(tmp_path / "one", template=None, fields=fields).render(CHAT) == "from the config"


def test_the_default_of_a_list_is_taken(tmp_path: Path) -> None:
    listed = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert tiny_tokenizer(tmp_path, template=None, fields={"chat_template": listed}).render(CHAT) == "yes"


@pytest.mark.parametrize("wrong", [[{"name": "tool_use", "template": "no"}], [], 5, {}])
def test_a_template_that_is_none_names_the_field(tmp_path: Path, wrong: object) -> None:
    write_tokenizer(tmp_path, template=None, fields={"chat_template": wrong})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template"):
        read_tokenizer(tmp_path)


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(ConfigError, match=r"no chat template .*use `kvouch generate`"):
        tokenizer.render(CHAT)
