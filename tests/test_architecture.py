"""The rules of the code base that no linter knows."""

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import xlstm_jax

PACKAGE = Path(xlstm_jax.__file__).parent
MODULES = {path.relative_to(PACKAGE.parent).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
READ_BEFORE = {"DataConfig.data_config_type"}
"""Fields that are read before there is a config: `recipes.data` chooses its class by it."""
HEAVY = {"grain", "hydra", "orbax", "torch", "transformers", "wandb"}


def test_every_module_has_a_docstring():
    assert [name for name, tree in MODULES.items() if not ast.get_docstring(tree)] == []


def test_every_public_function_annotates_its_arguments():
    bare = []
    for name, tree in MODULES.items():
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and is_public(node)]
        for node in [*tree.body, *(member for owner in classes for member in owner.body)]:
            if isinstance(node, ast.FunctionDef) and is_public(node):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                unknown = [a.arg for a in arguments if a.annotation is None and a.arg not in {"self", "cls"}]
                bare += [f"{name}, line {node.lineno}: {node.name}({argument})" for argument in unknown]
    assert bare == []


def is_public(node: ast.ClassDef | ast.FunctionDef) -> bool:
    return not node.name.startswith("_") or node.name.endswith("__")


@pytest.mark.parametrize("statement", ["import xlstm_jax", "from xlstm_jax.dataset import Batch"])
def test_heavy_packages_are_imported_only_by_those_who_use_them(statement):
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    process = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    imported = process.stdout.split()
    assert "xlstm_jax" in imported
    assert HEAVY.isdisjoint(imported)


def config_classes() -> list[ast.ClassDef]:
    """All dataclasses that are called a config or inherit from one."""
    classes = [node for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    classes = [node for node in classes if any("dataclass" in ast.unparse(line) for line in node.decorator_list)]
    names = {"ConfigDict"} | {node.name for node in classes if node.name.endswith("Config")}
    while heirs := {node.name for node in classes if names & set(map(last_name, node.bases))} - names:
        names |= heirs
    return [node for node in classes if node.name in names]


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`."""
    return ast.unparse(node).rpartition(".")[2]


def declared_fields(config: ast.ClassDef) -> Iterator[str]:
    """The fields that a dataclass adds to those of its bases."""
    for node in config.body:
        if isinstance(node, ast.AnnAssign) and not last_name(node.annotation).startswith("ClassVar"):
            yield ast.unparse(node.target)


class FieldReads(ast.NodeVisitor):
    """Collects the names of all attributes that are read from what may be a config.

    That leaves out attributes of imported modules, `self.x` in a class that is no config, and `__post_init__` of a
    config: a field that is only validated does nothing.
    """

    def __init__(self, tree: ast.Module, configs: list[ast.ClassDef]):
        self.names: set[str] = set()
        self.in_config = False
        self.configs = configs
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        self.imported = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
        self.visit(tree)

    def visit_ClassDef(self, node: ast.ClassDef):
        outside, self.in_config = self.in_config, node in self.configs
        self.generic_visit(node)
        self.in_config = outside

    def visit_FunctionDef(self, node: ast.FunctionDef):
        if not (self.in_config and node.name == "__post_init__"):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute):
        owner, _, path = ast.unparse(node.value).partition(".")
        is_own = owner == "self" and not path and not self.in_config
        if isinstance(node.ctx, ast.Load) and owner not in self.imported and not is_own:
            self.names.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call):
        if last_name(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
            self.names.add(node.args[1].value)
        self.generic_visit(node)


def test_every_field_of_a_config_is_read():
    configs = config_classes()
    assert configs
    read = set().union(*(FieldReads(tree, configs).names for tree in MODULES.values()))
    unread = {f"{config.name}.{field}" for config in configs for field in declared_fields(config) if field not in read}
    assert unread == READ_BEFORE


def test_a_config_writes_to_no_other_object():
    offences = []
    for config in config_classes():
        for node in ast.walk(config):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                written = ast.unparse(node.value)
            elif isinstance(node, ast.Call) and last_name(node.func) in {"setattr", "__setattr__"}:
                written = ast.unparse(node.args[0])
            elif isinstance(node, ast.Call) and last_name(node.func) == "__post_init__":
                written = ast.unparse(node.func).removesuffix(".__post_init__")
            else:
                continue
            if written not in {"self", "super()"}:
                offences.append(f"{config.name}, line {node.lineno}: {ast.unparse(node)}")
    assert offences == []


def test_nobody_writes_into_a_config():
    written = [
        f"{name}, line {node.lineno}: {ast.unparse(node)}"
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and not isinstance(node.ctx, ast.Load)
        and last_name(node.value).lower().endswith(("config", "cfg"))
    ]
    assert written == []


def test_every_public_module_is_in_the_reference():
    pages = (PACKAGE.parent / "docs" / "reference").glob("*.md")
    documented = {line.removeprefix("::: ") for page in pages for line in page.read_text().splitlines()}
    modules = {name.removesuffix(".py").replace("/", ".") for name in MODULES if "/_" not in name}
    assert modules - documented == set()


def test_the_tutorial_of_the_toolbox_quotes_its_example_as_it_is():
    tutorial = (PACKAGE.parent / "docs" / "tutorials" / "toolbox.md").read_text()
    example = (PACKAGE.parent / "examples" / "toolbox.py").read_text()
    quotes = re.findall(r"^```python\n(.*?)^```", tutorial, re.MULTILINE | re.DOTALL)
    assert quotes
    assert [quote for quote in quotes if quote not in example] == []


def test_the_wheel_holds_every_file_of_the_package(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=PACKAGE.parent, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    sources = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    sources = {name for name in sources if "__pycache__" not in name}
    assert "xlstm_jax/py.typed" in sources
    assert sources - packed == set()
    metadata = {"METADATA", "WHEEL", "RECORD", "LICENSE", "entry_points.txt"}
    added = {name for name in packed - sources if not name.startswith("xlstm_jax/benchmarks/")}
    assert {Path(name).name for name in added} == metadata
