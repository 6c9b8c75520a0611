"""Build script. Tool settings live in pyproject.toml, pinned environments in requirements/.

`recipe` stays a namespace package (no __init__.py), because other distributions install folders of that
name too. `recipe/offpolicy/config` links to `configs/`; it is found as a data-only namespace package, so
the YAML files are copied into wheels by content. `hydra_plugins` is the namespace in which Hydra looks for plugins.
"""

import runpy
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent
RELEASES = runpy.run_path(str(HERE / "verl_patches" / "releases.py"))
VERSION = runpy.run_path(str(HERE / "recipe" / "offpolicy" / "version.py"))["VERSION"]
verl, vllm = RELEASES["TESTED"], RELEASES["VLLM"]
VERL = f"verl>={verl[0]},<={verl[-1]}"
RAY = "ray[default]>=2.41"
VLLM = f"vllm>={vllm[0]},<={vllm[-1]}"
FLASH_ATTN = f"flash-attn=={RELEASES['FLASH_ATTN']}.*"
MEGATRON = ["mbridge==0.15.1", "megatron-core==0.16.1"]
QUICKSTART = ["matplotlib", "pandas", "psutil", "pyarrow>=19", "reasoning-gym", "rich", "transformers", "xxhash"]
EVIDENCE = ["matplotlib", "rich"]
TOOLS = ["argcomplete", "bokeh>=3.4", "jinja2", "matplotlib", "numpy", "polars>=1.30", "pyarrow>=19", "rich", "xxhash"]
TEST = ["hypothesis", "mypy", "pytest>=8", "pytest-timeout", "pytest-xdist", "ruff", "setuptools>=77.0.3"]

setup(
    name="verl-offpolicy",
    version=VERSION,
    description="Off-policy corrections for verl, proved live in the gradient",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    # An explicit root makes the editable install one plain .pth entry, which every tool understands.
    package_dir={"": "."},
    packages=find_namespace_packages(
        include=["recipe.*", "verl_patches", "verl_patches.*", "hydra_plugins.*"],
        exclude=["*.__pycache__", "*.outputs*"],
    ),
    package_data={"": ["*.yaml", "*.md", "*.sh", "REQUIRED_VERL.txt", "py.typed"]},
    # verl 0.9 and later load it in every process; it does nothing unless the environment asks for patches.
    entry_points={
        "verl.plugins": ["offpolicy = verl_patches.plugin"],
        "console_scripts": ["offpolicy = recipe.offpolicy.__main__:main"],
    },
    # What the package imports by itself; everything that needs a particular build is an extra.
    install_requires=["hydra-core>=1.3", "omegaconf>=2.3", "packaging>=20", "torch>=2.6"],
    extras_require={
        "verl": [VERL, RAY],
        "ray": [RAY],
        "vllm": [VLLM],
        # A CUDA environment; flash-attn builds against the torch that is installed: --no-build-isolation.
        "gpu": [VERL, RAY, VLLM, FLASH_ATTN],
        "megatron": MEGATRON,
        "evidence": EVIDENCE,
        "quickstart": QUICKSTART,
        # doctor, whatif, calibrate, attribute and report; transformers shows tokens as text.
        "tools": [*TOOLS, "transformers"],
        "docs": ["mkdocs-material>=9.5"],
        "panels": ["tensorboard", "wandb-workspaces"],
        "test": TEST,
        "dev": [VERL, RAY, *QUICKSTART, *EVIDENCE, *TOOLS, *TEST],
    },
)
