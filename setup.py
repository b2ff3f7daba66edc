"""Which packages there are: kvbench and all below it, and conf/ as kvbench.conf. The rest stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["kvbench", "kvbench.*"]), "kvbench.conf"],
    package_dir={"kvbench": "kvbench", "kvbench.conf": "conf"},
)
