"""What pyproject.toml can't say: folders outside of `src/` that ship inside the package."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages("src"), "allranks._profiles"],
    package_dir={"": "src", "allranks._profiles": "profiles"},
    package_data={"allranks._profiles": ["*.yaml"]},
)
