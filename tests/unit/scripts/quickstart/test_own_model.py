"""A user's model in the quickstart: the bucket for its weights, and folders that cannot be trained."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scripts.quickstart import own_model
from scripts.quickstart.options import MODEL_PATH, Options

MIB = 2**20
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 3072, "hidden_size": 2048}
EMBEDDING = "model.embed_tokens.weight"


def save_folder(folder: Path, **tensors: torch.Tensor) -> Path:
    """A folder with everything that is needed; its embedding has 3072 x 2048 elements, 24 MiB in float32."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    save_file(tensors or {EMBEDDING: torch.zeros(3072, 2048, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder


def read_bucket(folder: Path, *overrides: str) -> list[str]:
    options = Options.read({"MODEL": str(folder)}, overrides)
    return [override for override in options.model_overrides if override.startswith(own_model.BUCKET)]


def test_the_bucket_holds_the_embedding_in_float32_whatever_the_files_hold(tmp_path: Path) -> None:
    """24 MiB of float32, saved as bfloat16, plus one for verl's alignment; tied or not."""
    assert read_bucket(save_folder(tmp_path)) == [f"{own_model.BUCKET}=25"]
    head = {EMBEDDING: torch.zeros(3072, 2048), "lm_head.weight": torch.zeros(3072, 2048)}
    assert read_bucket(save_folder(tmp_path, **head)) == [f"{own_model.BUCKET}=25"]


def test_verls_own_path_of_the_model_counts_like_the_variable(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "it's here")
    options = Options.read({"MODEL": "/elsewhere"}, [f'{MODEL_PATH}="{folder}"'])
    assert options.model == folder
    assert f"{own_model.BUCKET}=25" in options.model_overrides


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: os.remove(folder / name)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (remove("config.json"), "no readable config.json"),
        (write("config.json", json.dumps(CONFIG | {"architectures": ["T5ForConditionalGeneration"]})), "is T5For"),
        (write("config.json", json.dumps(CONFIG | {"quantization_config": {"quant_method": "gptq"}})), "quantised"),
        (remove("model.safetensors"), "it has no weights"),
        (write("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda folder: os.truncate(folder / "model.safetensors", 10_000), "model.safetensors is damaged or cut off"),
        (remove("tokenizer.json"), "it has no tokenizer"),
        (remove("chat_template.jinja"), "no chat template"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused_with_the_reason(
    spoil: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    folder = save_folder(tmp_path / "model")
    spoil(folder)
    with pytest.raises(ValueError, match=f"MODEL={folder}: .*{said}"):
        Options.read({"MODEL": str(folder)}, [])


def test_a_machine_whose_shared_memory_is_smaller_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=20 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"needs 25 MiB of /dev/shm .* 20 MiB are free.*--shm-size=50m"):
        read_bucket(save_folder(tmp_path))
    read_bucket(tmp_path, "platform=cuda")
