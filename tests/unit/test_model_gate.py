"""What cannot be served exactly is refused at load, with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.runner import ModelRunner
from tests.tiny_models import build_tiny

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DECODER = SMALL | {"intermediate_size": 64, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("llama"), "llama")


def load(path: Path, **options: Any) -> ModelRunner:
    return ModelRunner.load(str(path), **({"device": "cpu", "kv_tokens": 512} | options))


def change_config(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model folder whose configuration says something else."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_longest_sequence_is_refused(
    llama: Path, tmp_path: Path, kind: str
) -> None:
    rope = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    if kind == "dynamic":
        del rope["short_factor"], rope["long_factor"]
    with pytest.raises(ModelError, match=f"{kind} rope"):
        load(change_config(llama, tmp_path, rope_parameters=rope))


@pytest.mark.parametrize(
    ("config", "architecture", "reason"),
    [
        (
            BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2),
            BloomForCausalLM,
            "attention registration",
        ),
        (FalconConfig(**SMALL), FalconForCausalLM, "its own attention"),
        (
            MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
            MambaForCausalLM,
            "rolled back",
        ),
        (
            T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2),
            T5ForConditionalGeneration,
            "encoder-decoder",
        ),
        (GraniteConfig(**DECODER, logits_scaling=4.0), GraniteForCausalLM, "logits_scaling"),
        (
            Gemma2Config(**DECODER, num_key_value_heads=1, head_dim=16, sliding_window=8),
            Gemma2ForCausalLM,
            "softcap",
        ),
        (
            Gemma2Config(
                **DECODER,
                num_key_value_heads=1,
                head_dim=16,
                sliding_window=8,
                final_logit_softcapping=None,
            ),
            Gemma2ForCausalLM,
            "attention takes softcap",
        ),
    ],
    ids=["bloom", "falcon", "mamba", "t5", "granite", "gemma2", "gemma2 without logit cap"],
)
def test_a_family_that_bends_or_ignores_the_hook_is_refused(
    tmp_path: Path, config: Any, architecture: Any, reason: str
) -> None:
    architecture(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as caught:
        load(tmp_path)
    assert config.model_type in str(caught.value) or "attention takes" in str(caught.value)


def test_another_family_is_served_when_it_passes(tmp_path: Path) -> None:
    GPTNeoXForCausalLM(GPTNeoXConfig(**DECODER)).save_pretrained(tmp_path)
    assert load(tmp_path).info.family == "gpt_neox"


def test_a_model_whose_packed_logits_differ_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison itself must be able to fail: shift every mask by one position."""
    from pilotfish_workers.model.pass_plan import Group

    right = Group.mask

    def shifted(group: Group, *arguments: Any) -> torch.Tensor:
        return right(group, *arguments).roll(1, dims=-1)

    monkeypatch.setattr(Group, "mask", shifted)
    with pytest.raises(ModelError, match="logits differ"):
        load(llama)
    assert load(llama, gate=False).info.family == "llama"


def test_a_window_that_is_ignored_is_noticed_beyond_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pilotfish_workers.model.pass_plan import Group

    right = Group.mask

    def without_window(group: Group, window: int | None, *arguments: Any) -> torch.Tensor:
        return right(group, None, *arguments)

    build_tiny(tmp_path, "qwen3", sliding_window=40)
    assert load(tmp_path).info.family == "qwen3"
    monkeypatch.setattr(Group, "mask", without_window)
    with pytest.raises(ModelError, match="over 48 tokens its logits differ"):
        load(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model folder .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


def test_weights_that_need_pickle_are_refused(llama: Path, tmp_path: Path) -> None:
    change_config(llama, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot load the model"):
        load(tmp_path)


@pytest.mark.parametrize("device", ["tpu", "cuda:77", "cuda:x", "cpu:a"])
def test_a_device_that_does_not_exist_is_named(llama: Path, device: str) -> None:
    with pytest.raises(ModelError, match=device):
        load(llama, device=device)


def test_an_unknown_dtype_is_named(llama: Path) -> None:
    with pytest.raises(ModelError, match="float8"):
        load(llama, dtype="float8")


def test_every_offered_dtype_passes_the_gate(llama: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        assert load(llama, dtype=dtype).info.dtype == dtype


def test_what_is_known_of_a_model_comes_from_its_folder(llama: Path, tmp_path: Path) -> None:
    info = load(llama).info
    assert (info.vocab_size, info.context_length, info.num_layers) == (288, 1024, 2)
    assert (info.dtype, info.device, info.eos_ids) == ("float32", "cpu", (0,))
    copy = change_config(llama, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert load(copy).info.eos_ids == (3, 7)


def test_the_fingerprint_follows_weights_and_configuration(llama: Path, tmp_path: Path) -> None:
    original = load(llama).info.fingerprint
    for name in ("same", "theta"):
        (tmp_path / name).mkdir()
    other = build_tiny(tmp_path / "other", "llama", seed=1)
    theta = {"rope_type": "default", "rope_theta": 5000.0}
    assert load(change_config(llama, tmp_path / "same")).info.fingerprint == original
    assert load(llama, dtype="bfloat16").info.fingerprint != original
    assert load(other).info.fingerprint != original
    changed = change_config(llama, tmp_path / "theta", rope_parameters=theta)
    assert load(changed).info.fingerprint != original


def test_rows_that_cannot_be_run_are_refused_before_the_pass(llama: Path) -> None:
    from pilotfish_workers.model.interface import Rows

    runner = load(llama)
    for row in (
        Rows([], 0, [0], 0),
        Rows([5], 16, [0], 1),
        Rows([288], 0, [0], 1),
        Rows([-1], 0, [0], 1),
        Rows([5], 0, [0], 2),
        Rows([5], 1024, list(range(32)) * 3, 1),
    ):
        with pytest.raises(ModelError):
            runner.greedy([row])
    assert runner.greedy([]) == []
