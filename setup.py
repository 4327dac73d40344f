"""What pyproject.toml cannot say: the top-level folders of recipes and clusters, and the
findings on ops among the docs, are data of the package in a wheel.
"""

from setuptools import find_packages, setup

DATA = {
    "alpa_strategy.recipes": "recipes",
    "alpa_strategy.configs": "configs",
    "alpa_strategy.docs": "docs",
}

setup(
    packages=[*find_packages(include=["alpa_strategy*"]), *DATA],
    package_dir=DATA,
    package_data={
        "alpa_strategy": ["py.typed"],
        "alpa_strategy.page": ["static/*"],
        "alpa_strategy.recipes": ["*.yaml"],
        "alpa_strategy.configs": ["clusters/*.yaml"],
        "alpa_strategy.docs": ["op_coverage.json"],
    },
)
