"""What the package promises from outside: its names, what an import costs, and the rules that every file keeps."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvouch
from kvouch import errors

PACKAGE = Path(kvouch.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
LONGEST = 320  # lines: a file is read in one sitting


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


# Names.


def test_the_public_names_are_these() -> None:
    """A name more or less is a decision, not an accident."""
    assert kvouch.__all__ == [
        "AuditedBackend",
        "BatchedBackend",
        "BlockPool",
        "CachedBackend",
        "ConcatCache",
        "Hit",
        "Identity",
        "Manifest",
        "Miss",
        "Model",
        "PagedCache",
        "Prompt",
        "Refused",
        "RollbackBackend",
        "StaticCache",
        "TransformersBackend",
        "UncachedBackend",
        "block_keys",
        "cache_bytes",
        "forward_cached",
        "forward_many",
        "generate_many",
        "load",
        "prefix_key",
    ]


@pytest.mark.parametrize("name", kvouch.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    found = getattr(kvouch, name)
    assert found.__name__ == name
    assert found.__module__.startswith("kvouch.")
    assert inspect.getdoc(found)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvouch' has no attribute 'Cache'"):
        kvouch.Cache  # noqa: B018
    with pytest.raises(ImportError):
        from kvouch import Cache  # noqa: F401


# Imports.

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "huggingface_hub", "jinja2")
WITHOUT_TORCH = [
    "kvouch",
    "kvouch.errors",
    "kvouch.digest",
    "kvouch.artefact.files",
    "kvouch.artefact.manifest",
    "kvouch.identity.identity",
    "kvouch.identity.keys",
    "kvouch.cli.manifest",
    "kvouch.cli.explain",
    "kvouch.cli.main",
    "kvouch.loader.home",
]


def imported_by(statement: str) -> set[str]:
    """Top-level packages that a fresh process has after a statement."""
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_no_tensor_library_is_imported_with(module: str) -> None:
    imported = imported_by(f"import {module}")
    assert "kvouch" in imported
    assert imported.isdisjoint(HEAVY)


def test_what_is_imported_is_seen() -> None:
    """So that the test above can fail."""
    assert "numpy" in imported_by("import kvouch; import numpy.linalg")


# The tree of errors.


def drawn_tree() -> dict[str, str]:
    """Each class of the tree in errors.py's docstring, with the class that it hangs from."""
    lines = (errors.__doc__ or "").splitlines()
    parents, path = {}, ["Exception"]
    for line in lines[lines.index("KvouchError") :]:
        match = re.match(r"([│├└─ ]*)(\w+)(  .*)?$", line)
        assert match, line
        depth = len(match[1]) // 4
        path = [*path[: depth + 1], match[2]]
        parents[match[2]] = path[-2]
    return parents


def test_the_tree_that_is_drawn_is_the_tree_of_classes() -> None:
    classes = {name: found for name, found in vars(errors).items() if inspect.isclass(found)}
    assert all(issubclass(found, errors.KvouchError) for found in classes.values())
    assert drawn_tree() == {name: found.__bases__[0].__name__ for name, found in classes.items()}
    assert all(len(found.__bases__) == 1 for found in classes.values())
    assert len(classes) > 10


def test_exit_statuses_are_two_for_usage_and_one_otherwise() -> None:
    for name, found in vars(errors).items():
        if inspect.isclass(found) and issubclass(found, errors.KvouchError):
            assert found.exit_status == (2 if issubclass(found, errors.UsageError) else 1), name


# Every file.


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))


def test_the_files_are_found() -> None:
    assert {"errors.py", "cache/base.py", "models/forward.py", "cli/main.py"} <= set(map(relative, FILES))


def test_subpackages_are_packages_and_their_init_is_empty() -> None:
    for folder in {path.parent for path in FILES} - {PACKAGE}:
        assert (folder / "__init__.py").read_bytes() == b"", relative(folder)


@pytest.mark.parametrize("path", [path for path in FILES if path.stat().st_size], ids=relative)
def test_a_file_keeps_the_rules(path: Path) -> None:
    faults = []
    text = path.read_text(encoding="utf-8")
    if len(text.splitlines()) > LONGEST:
        faults.append(f"{len(text.splitlines())} lines")
    tree = ast.parse(text)
    faults += [f"line {line}: {what}" for line, what in undocumented(path, tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            faults.append(f"line {node.lineno}: assert; raise a named error")
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            faults.append(f"line {node.lineno}: bare except")
    assert faults == []


def undocumented(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The module, and its public functions and classes, where they have no docstring.

    A command has its name from its file and its text from `help=`.
    """
    if not ast.get_docstring(tree):
        yield 1, "module without a docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            command = path.parent.name == "cli" and node.name == path.stem
            exempt = node.name.startswith("_") or command
            if not exempt and not ast.get_docstring(node):
                yield node.lineno, f"{node.name} without a docstring"


def test_no_output_is_printed_outside_the_command_line() -> None:
    for path in FILES:
        if relative(path).startswith("cli/"):
            continue
        calls = [node for node in nodes(path) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"], relative(
            path
        )


def test_the_environment_is_read_in_few_places() -> None:
    """Style, rule 8: no ambient state."""
    readers = {
        relative(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert {name for name in readers if not name.startswith("cli/")} <= {"loader/home.py"}


def test_pickles_are_never_opened() -> None:
    """No call that could: nothing named pickle, and no torch.load."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "cPickle", "dill", "shelve", "marshal"} & set(names), relative(path)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) != ("torch", "load"), relative(path)
