"""Who may know whom: each room of minikv keeps to its own subject, so that it can be read, tested
and replaced alone. Read from the source, not from what happens to be imported at run time."""

import ast
import sys
from pathlib import Path

import pytest

import minikv

PACKAGE = Path(minikv.__file__).parent
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
LIBRARIES = {"torch", "numpy", "safetensors", "tokenizers", "jinja2", "cbor2", "triton"}


def imports(path):
    """Dotted names of all modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: say in full what is imported"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def rooms(path):
    """The files of minikv that one of them imports, such as {"blocks", "request"}."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("minikv.")}


def test_all_files_are_seen():
    names = "engine tokenizer request scheduler blocks runner model weights".split()
    assert {f"{name}.py" for name in names} <= FILES.keys()
    assert "attention/paged.py" in FILES


@pytest.mark.parametrize("name", FILES)
def test_only_a_few_libraries(name):
    """No kvlab, and no transformers: what is measured against it must not contain it."""
    tops = {module.split(".")[0] for module in imports(FILES[name])}
    assert tops - set(sys.stdlib_module_names) <= LIBRARIES | {"minikv"}


@pytest.mark.parametrize("name", ["scheduler.py", "blocks.py", "radix.py", "request.py"])
def test_policy_knows_no_tensors(name):
    tops = {module.split(".")[0] for module in imports(FILES[name])}
    assert not tops & {"torch", "numpy", "safetensors", "tokenizers", "jinja2"}
    assert rooms(FILES[name]) <= {"blocks", "radix", "request"}


@pytest.mark.parametrize("name", ["blocks.py", "radix.py"])
def test_the_caches_know_no_requests(name):
    assert rooms(FILES[name]) == set()


def test_a_request_knows_nobody():
    assert rooms(FILES["request.py"]) == set()


def test_the_model_knows_no_scheduling():
    assert rooms(FILES["model.py"]) == {"linear"}
    assert rooms(FILES["linear.py"]) == set()


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("attention/")])
def test_attention_knows_only_shapes(name):
    assert rooms(FILES[name]) <= {"attention", "model"}


def test_text_stays_with_the_engine():
    """Only the engine turns tokens into text."""
    users = {name for name, path in FILES.items() if "tokenizer" in rooms(path)}
    assert users == {"engine.py"}
