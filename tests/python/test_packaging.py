"""The recipe for conda and the workflows say what pyproject.toml says."""
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()


def quoted(key):
    return set(re.findall(r'"([^"]+)"', re.search(rf"^{key} = \[(.*)\]", PROJECT, re.MULTILINE)[1]))


def test_the_recipe_needs_what_the_wheel_needs():
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
    python = re.search(r'^requires-python = "(.*)"', PROJECT, re.MULTILINE)[1]
    needed = {f"python {python}", *(name.lower() for name in quoted("dependencies"))}
    assert set(recipe["requirements"]["run"]) == needed
    built_with = {requirement.replace(" ", "") for requirement in recipe["requirements"]["host"]}
    assert built_with == {"python", "pip", *quoted("requires")}
    version, = re.findall(r'^__version__ = "(.*)"', (ROOT / "lightcc" / "_version.py").read_text(), re.MULTILINE)
    assert recipe["context"]["version"] == version


def test_rattler_build_understands_the_recipe():
    rattler = pytest.importorskip("rattler_build", reason="missing: rattler_build (pip install py-rattler-build)")
    variants = rattler.VariantConfig.from_file(ROOT / "recipe" / "variants.yaml")
    rendered, = rattler.Stage0Recipe.from_file(ROOT / "recipe" / "recipe.yaml").render(variants)
    assert rendered.recipe.package.name == "lightcc"
