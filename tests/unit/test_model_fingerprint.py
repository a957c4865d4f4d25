"""Sampled fingerprints of large weight files."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotfish_workers.model import fingerprint
from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.fingerprint import model_fingerprint
from tests.tiny_models import build_tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fingerprint, "_WHOLE_FILE_BYTES", 0)
    return build_tiny(tmp_path / "model", "llama")


def test_a_copy_elsewhere_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert model_fingerprint(copy, "float32") == model_fingerprint(folder, "float32")


def test_training_any_one_tensor_changes_the_fingerprint(folder: Path) -> None:
    original = model_fingerprint(folder, "float32")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        changed = {**tensors, name: tensors[name] * (1 + 2**-10)}
        save_file(changed, path, metadata={"format": "pt"})
        assert model_fingerprint(folder, "float32") != original, name
    save_file(tensors, path, metadata={"format": "pt"})
    assert model_fingerprint(folder, "float32") == original


def test_other_shapes_of_the_same_bytes_are_another_model(folder: Path) -> None:
    original = model_fingerprint(folder, "float32")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor.reshape(-1) for name, tensor in tensors.items()}, path)
    assert model_fingerprint(folder, "float32") != original


def test_a_folder_without_readable_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="not a safetensors file"):
        model_fingerprint(folder, "float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors weights"):
        model_fingerprint(folder, "float32")


def test_large_tensors_are_sampled_from_first_to_last_byte() -> None:
    offsets = fingerprint._sample_offsets(100, 100 + (1 << 20))
    assert offsets[0] == 100
    assert offsets[-1] + fingerprint._SAMPLE_BYTES == 100 + (1 << 20)
    assert len(offsets) == len(set(offsets)) == 8
    assert torch.tensor(offsets).diff().max() < (1 << 20) // 6
