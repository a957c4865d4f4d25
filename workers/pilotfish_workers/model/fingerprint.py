"""Identity of a model folder: equal fingerprints mean equal weights, as far as that is cheap.

Small files are hashed whole. Of a large safetensors file the header (names, shapes, dtypes,
offsets) is hashed with evenly spaced samples of each tensor, so that a fine-tuned copy, which
moves nearly every value, gets another fingerprint without reading gigabytes.
"""

import hashlib
import json
from pathlib import Path
from typing import BinaryIO

from pilotfish_workers.model.errors import ModelError

__all__ = ["model_fingerprint"]

_FORMAT = b"pilotfish-model-1"
_WHOLE_FILE_BYTES = 64 << 20
_SAMPLE_BYTES = 4096
_SAMPLES_PER_TENSOR = 8
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format itself
# says how the file was made, not what the model computes
_INCIDENTAL = frozenset({"transformers_version", "_name_or_path"})


def model_fingerprint(folder: Path, dtype: str) -> str:
    """SHA-256, hexadecimal, over configuration, weights and the dtype they are run in.

    `ModelError` if the folder has no readable `config.json` or no safetensors file.
    """
    digest = hashlib.sha256(_FORMAT)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder} has no *.safetensors weights; convert the model to them")
        kept = {key: value for key, value in config.items() if key not in _INCIDENTAL}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        digest.update(dtype.encode())
        for path in files:
            digest.update(_file_digest(path))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the model in {folder}: {error}") from error
    return digest.hexdigest()


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        if path.stat().st_size <= _WHOLE_FILE_BYTES:
            return hashlib.file_digest(file, "sha256").digest()
        return _sampled_digest(file, path.stat().st_size)


def _sampled_digest(file: BinaryIO, size: int) -> bytes:
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > min(size, _MAX_HEADER_BYTES):
        raise ValueError("not a safetensors file")
    header = file.read(header_bytes)
    digest.update(header)
    base = 8 + header_bytes
    for name, entry in sorted(json.loads(header).items()):
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        for offset in _sample_offsets(begin, end):
            file.seek(base + offset)
            digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
    return digest.digest()


def _sample_offsets(begin: int, end: int) -> list[int]:
    """Where to sample a tensor's bytes: all of it if small, else evenly from first to last."""
    if end - begin <= _SAMPLE_BYTES * _SAMPLES_PER_TENSOR:
        return list(range(begin, end, _SAMPLE_BYTES))
    step = (end - begin - _SAMPLE_BYTES) / (_SAMPLES_PER_TENSOR - 1)
    return [begin + round(i * step) for i in range(_SAMPLES_PER_TENSOR)]
