"""The entry point: exit statuses, one line for an error, and no import that help does not need."""

import subprocess
import sys
from importlib.metadata import version
from types import ModuleType

import pytest
import typer

from kvouch.cli import main as entry
from kvouch.errors import ConfigError, DownloadError, KvouchError, UnknownModel


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        entry.main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def say(text: str) -> None:
    if text == "interrupt":
        raise KeyboardInterrupt
    if text == "unknown":
        raise UnknownModel("no model is called\n'unknown'")
    if text == "broken":
        raise ConfigError("config.json: field x")
    if text == "refused":
        raise DownloadError("tried everything")
    if text == "fault":
        raise RuntimeError
    typer.echo(text)


@pytest.fixture
def one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command `say` that is one function in a module of its own, as `ask` will be."""
    module = ModuleType("kvouch.cli.say")
    module.__dict__["say"] = say
    monkeypatch.setitem(sys.modules, "kvouch.cli.say", module)
    monkeypatch.setattr(entry, "COMMANDS", {"say": "Say it."})


@pytest.mark.usefixtures("one_command")
@pytest.mark.parametrize(
    ("argument", "status", "stderr"),
    [
        ("hello", 0, ""),
        ("unknown", 2, "kvouch: no model is called 'unknown'\n"),
        ("broken", 1, "kvouch: config.json: field x\n"),
        ("refused", 1, "kvouch: tried everything\n"),
        ("interrupt", 130, ""),
    ],
)
def test_how_a_command_ends(capsys: pytest.CaptureFixture[str], argument: str, status: int, stderr: str) -> None:
    assert run("say", argument) == status
    assert capsys.readouterr() == ("hello\n" if status == 0 else "", stderr)


@pytest.mark.usefixtures("one_command")
@pytest.mark.parametrize(
    "arguments", [["--bogus"], ["bogus"], ["say", "--bogus"], ["say"], ["say", "a", "b"], ["models"]]
)
def test_wrong_usage_is_2_without_a_traceback(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(*arguments) == 2
    stderr = capsys.readouterr().err
    assert "Usage: kvouch" in stderr
    assert "Traceback" not in stderr


@pytest.mark.usefixtures("one_command")
def test_help_lists_the_commands_and_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    stdout = capsys.readouterr().out
    assert "say  Say it." in stdout
    assert "--version" in stdout
    assert run("say", "--help") == 0
    assert "Say it." in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"kvouch {version('kvouch')}\n"


@pytest.mark.usefixtures("one_command")
def test_a_fault_of_ours_is_not_dressed_up_as_the_users() -> None:
    with pytest.raises(RuntimeError):
        entry.main(["say", "fault"])


@pytest.mark.parametrize("name", list(entry.COMMANDS))
def test_every_command_loads(name: str) -> None:
    assert callable(entry.load_command(name))


def test_every_error_has_a_status_that_is_not_success() -> None:
    def tree(error: type[KvouchError]) -> list[type[KvouchError]]:
        return [error, *(below for child in error.__subclasses__() for below in tree(child))]

    assert {error.exit_status for error in tree(KvouchError)} == {1, 2}


HEAVY = ("torch", "numpy", "rich", "transformers", "huggingface_hub", "tokenizers", "safetensors", "gguf")
LOADED = """
import sys
from kvouch.cli.main import main
try:
    main({arguments})
except SystemExit as ended:
    assert ended.code == 0, ended.code
print("LOADED", *(name for name in {heavy} if name in sys.modules))
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = LOADED.format(arguments=arguments, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_a_reader_that_went_away_is_no_noise() -> None:
    code = "import sys; sys.stdin.read(); from kvouch.cli.main import main; main(['--help'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()  # before the process may write its first byte
    process.stdout = None
    _, stderr = process.communicate("")
    assert stderr == ""
