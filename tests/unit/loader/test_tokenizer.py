"""Text to ids and back, what ends an answer, and which files say so."""

import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, processors

from kvouch.artefact.files import ArtefactFiles
from kvouch.errors import ConfigError, FileError, UsageError
from kvouch.loader.tokenizer import TextStream, Tokenizer, load_tokenizer
from tiny_tokenizer import CONFIG, END, END_ID, byte_tokenizer, read_tokenizer, tiny_tokenizer, write_tokenizer


def around(template: str) -> tokenizers.Tokenizer:
    """The byte tokenizer with a post-processor, as `<|end|> $A` (a BOS) or `$A <|end|>` (an EOS)."""
    core = byte_tokenizer()
    core.post_processor = processors.TemplateProcessing(single=template, special_tokens=[(END, END_ID)])
    return core


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """As SentencePiece models are: a mark for each space, and bytes for what has no token."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "▁"]
    core = tokenizers.Tokenizer(
        models.BPE(
            vocab={word: number for number, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core


@pytest.mark.parametrize("other", [None, "tokenizer.model", "tokenizer.pkl"])
def test_only_tokenizer_json_is_a_tokenizer(tmp_path: Path, other: str | None) -> None:
    if other:
        (tmp_path / other).write_bytes(b"\x80\x04.")
    assert load_tokenizer(ArtefactFiles(tmp_path), CONFIG) is None


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back(text: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), where="", stop_ids=frozenset(), template=None)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) or END in text
    assert tokenizer.decode(ids, skip_special=False) == text


def test_special_ids_are_left_out_of_text(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(f"a{END}b")) == "ab"


def test_bos_is_added_once(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, core=around(f"{END} $A"))
    plain = tokenizer.encode("aa", special=False)
    assert END_ID not in plain
    assert tokenizer.encode("aa") == [END_ID, *plain]
    assert tokenizer.encode(f"{END}aa") == [END_ID, *plain]
    assert tokenizer.encode(f"{END}{END}aa") == [END_ID, END_ID, *plain]
    assert tokenizer.encode(f"{END}aa", special=False) == [END_ID, *plain]


@pytest.mark.parametrize("text", ["aa", "aaa", "a", END, ""])
def test_a_doubled_first_letter_is_no_second_bos(tmp_path: Path, text: str) -> None:
    plain = tiny_tokenizer(tmp_path / "none").encode(text)
    assert tiny_tokenizer(tmp_path / "eos", core=around(f"$A {END}")).encode(text) == [*plain, END_ID]


def test_truncation_and_padding_in_the_file_are_off(tmp_path: Path) -> None:
    core = byte_tokenizer()
    core.enable_truncation(4)
    core.enable_padding(length=12, pad_id=0)
    assert len(tiny_tokenizer(tmp_path, core=core).encode("abcdefgh")) == 8


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not UTF-8 \(character 2\)"):
        tiny_tokenizer(tmp_path).encode("ab\udcff")


def test_a_vocabulary_beyond_the_models_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"ids up to 256, but vocab_size in config.json is 256"):
        read_tokenizer(tmp_path, {"vocab_size": 256})
    assert read_tokenizer(tmp_path, {"vocab_size": 257}).stop_ids == {END_ID}


def test_a_broken_tokenizer_json_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(FileError, match=r"tokenizer\.json: not a tokenizer"):
        read_tokenizer(tmp_path)


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "elsewhere")
    (tmp_path / "model").mkdir()
    os.symlink(tmp_path / "elsewhere" / "tokenizer.json", tmp_path / "model" / "tokenizer.json")
    with pytest.raises(FileError, match="a link to"):
        read_tokenizer(tmp_path / "model")


@pytest.mark.parametrize(
    ("generation", "config", "fields", "wanted"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 9}, {}, {7}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {}, {7, 8}),
        ({}, {"eos_token_id": 9}, {}, {9}),
        (None, {"eos_token_id": [9, 10]}, {}, {9, 10}),
        (None, {"eos_token_id": None}, {}, set()),
        ({"eos_token_id": 7}, {"eos_token_id": 9}, {"eos_token": END}, {7, END_ID}),
        (None, {}, {"eos_token": {"content": END, "special": True}}, {END_ID}),
    ],
)
def test_what_ends_an_answer(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    fields: dict[str, Any],
    wanted: set[int],
) -> None:
    write_tokenizer(tmp_path, fields=fields, generation=generation)
    assert read_tokenizer(tmp_path, {"vocab_size": 257, **config}).stop_ids == wanted


@pytest.mark.parametrize("wrong", [257, -1, True, "7", [7, 257]])
def test_an_impossible_stop_id_names_its_file(tmp_path: Path, wrong: object) -> None:
    write_tokenizer(tmp_path, generation={"eos_token_id": wrong})
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(("token", "said"), [("<|no|>", "is not in tokenizer.json"), (5, "a string is needed")])
def test_an_impossible_eos_token_names_its_file(tmp_path: Path, token: object, said: str) -> None:
    write_tokenizer(tmp_path, fields={"eos_token": token})
    with pytest.raises(ConfigError, match=rf"tokenizer_config\.json: eos_token .*{said}"):
        read_tokenizer(tmp_path)


def test_characters_come_whole(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    stream = tokenizer.stream()
    assert [stream.step(one) for one in tokenizer.encode("aé€")] == ["a", "", "é", "", "", "€"]
    assert stream.finish() == ""


def test_half_a_character_at_the_end_is_dropped(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    stream = tokenizer.stream()
    assert "".join(stream.step(one) for one in tokenizer.encode("a€")[:-1]) == "a"
    assert stream.finish() == ""


def test_whole_characters_before_half_a_one_are_kept() -> None:
    core = byte_tokenizer()
    core.add_tokens([AddedToken("xy", normalized=False)])
    both = core.get_vocab()["xy"], core.encode("é").ids[0]
    stream = TextStream(core)
    assert "".join(stream.step(one) for one in both) + stream.finish() == "xy"


def test_a_context_decides_about_the_first_space() -> None:
    core = byte_fallback_tokenizer()
    vocabulary = core.get_vocab()
    hello, world = vocabulary["▁Hello"], vocabulary["▁world"]
    assert TextStream(core).step(hello) == "Hello"
    assert TextStream(core, [hello]).step(world) == " world"


def test_a_context_that_ends_within_a_character_is_not_given_out(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    stream = tokenizer.stream(tokenizer.encode("secret é")[:-1])
    assert "secret" not in "".join(stream.step(one) for one in tokenizer.encode("a b"))


def test_bytes_that_undo_a_character_do_not_end_the_stream() -> None:
    """A run of byte tokens that spelt a character no longer does when another byte follows it."""
    core = byte_fallback_tokenizer()
    vocabulary, stream = core.get_vocab(), TextStream(core)
    tokens = [*(f"<0x{byte:02X}>" for byte in (0xE4, 0xB8, 0xAD, 0xFF)), "▁Hello", "▁world"]
    text = "".join(stream.step(vocabulary[token]) for token in tokens)
    assert text.startswith("中")
    assert text.endswith(" world")


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_stream_gives_the_text_that_decode_gives(text: str) -> None:
    core = byte_tokenizer()
    stream = TextStream(core)
    ids = core.encode(text).ids
    assert "".join([*(stream.step(one) for one in ids), stream.finish()]) == core.decode(ids).rstrip("\ufffd")
