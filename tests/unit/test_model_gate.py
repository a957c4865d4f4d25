"""What cannot be served exactly is refused at load, with the reason."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pilotfish_workers.model import loading
from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.model.packed_pass import run_pass
from pilotfish_workers.model.paged_attention import PagedPass
from pilotfish_workers.model.pass_plan import Group, build_plan
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


CONFIG_ONLY = {
    "t5": ({}, "encoder-decoder"),
    "mamba": ({}, "linear_attention, whose state cannot be rolled back"),
    "recurrent_gemma": ({}, "whose state cannot be rolled back"),
    "jamba": ({}, "whose state cannot be rolled back"),
    "qwen3_next": ({}, "whose state cannot be rolled back"),
    "falcon_h1": ({}, "hybrid, whose state cannot be rolled back"),
    "lfm2": ({"full_attn_idxs": [2]}, "conv, whose state cannot be rolled back"),
    "llama4_text": ({}, "attention is chunked"),
    "mpt": ({}, "ALiBi"),
    "musicgen": ({}, "more than one part for text"),
    "glm_moe_dsa": ({}, "indexed_attention, which paged attention does not serve"),
    "gemma3_text": ({"use_bidirectional_attention": True}, "attention is bidirectional"),
    "gemma4_text": ({"num_kv_shared_layers": 1}, "layers share keys and values"),
}


@pytest.mark.parametrize("model_type", CONFIG_ONLY)
def test_what_the_configuration_shows_is_refused_before_any_weights_are_read(
    tmp_path: Path, model_type: str
) -> None:
    changes, reason = CONFIG_ONLY[model_type]
    AutoConfig.for_model(model_type, **changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"this {model_type} model.*{reason}"):
        load(tmp_path)  # there are none


BENT = {
    "bloom": ({"n_layer": 2, "n_head": 2}, "use the attention registration 0 times"),
    "falcon": ({}, "brings its own attention"),
    "diffllama": (DECODER, "its 2 layers use the attention registration 4 times"),
    "doge": (DECODER, "an attention mask of its own"),
    "bert": (DECODER, "logits differ from the plain model's"),
    "trocr": (
        {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 32, "decoder_attention_heads": 2},
        "cannot be asked for the logits of single tokens",
    ),
    # the one applies the window in its masks alone, the other in its cache alone
    "phimoe": (
        DECODER | {"sliding_window": 8, "num_local_experts": 4},
        "do not tell attention the window",
    ),
    "llama": (DECODER | {"sliding_window": 8}, "do not tell attention the window"),
}


@pytest.mark.parametrize("model_type", BENT)
def test_a_family_that_bends_or_ignores_the_hook_is_refused(
    tmp_path: Path, model_type: str
) -> None:
    changes, reason = BENT[model_type]
    config = AutoConfig.for_model(model_type, **(SMALL | changes))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"this {model_type} model.*{reason}"):
        load(tmp_path)


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


def test_a_long_rope_is_served_up_to_its_original_length(llama: Path, tmp_path: Path) -> None:
    runner = load(change_config(llama, tmp_path, rope_parameters=LONG_ROPE))
    assert runner.info.context_length == 64


def test_what_scales_by_the_longest_sequence_is_noticed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model as if it were served beyond that length."""
    monkeypatch.setattr(loading, "_long_rope_lengths", lambda config: [])
    with pytest.raises(ModelError, match="with a sequence at the end of its context"):
        load(change_config(llama, tmp_path, rope_parameters=LONG_ROPE))


def test_a_dynamic_rope_is_served_over_its_whole_context(llama: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    runner = load(change_config(llama, tmp_path, rope_parameters=rope))
    assert runner.info.context_length == 1024


def test_the_text_of_a_model_with_images_is_served(tmp_path: Path) -> None:
    text = DECODER | {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}
    vision = SMALL | {"intermediate_size": 32, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4, dtype="float32"
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load(tmp_path).info.family == "gemma3"


def test_a_model_whose_packed_logits_differ_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison itself must be able to fail: shift every mask by one position."""
    right = Group.mask

    def shifted(group: Group, *arguments: Any) -> torch.Tensor:
        return right(group, *arguments).roll(1, dims=-1)

    monkeypatch.setattr(Group, "mask", shifted)
    with pytest.raises(ModelError, match="logits differ"):
        load(llama)
    assert load(llama, gate=False).info.family == "llama"


@pytest.mark.parametrize("window", [40, 512])
@pytest.mark.parametrize("error", ["ignored", "one too long"])
def test_a_window_that_is_not_applied_is_noticed_whatever_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, error: str
) -> None:
    right = Group.mask

    def wrong(group: Group, window: int | None, *arguments: Any) -> torch.Tensor:
        longer = window + 1 if window and error == "one too long" else None
        return right(group, longer, *arguments)

    build_tiny(tmp_path, "qwen3", sliding_window=window)
    assert load(tmp_path).info.family == "qwen3"
    monkeypatch.setattr(Group, "mask", wrong)
    expected = "over 48 tokens" if window == 40 else "and with windows of 7, over 29 tokens"
    with pytest.raises(ModelError, match=f"{expected} its logits differ"):
        load(tmp_path)


@pytest.mark.parametrize(("family", "argument"), [("gemma2", "softcap"), ("gpt_oss", "sinks")])
def test_caps_and_sinks_that_are_not_applied_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, argument: str
) -> None:
    build_tiny(tmp_path, family)
    right = PagedPass.attend

    def wrong(paged: PagedPass, *arguments: Any) -> torch.Tensor:
        *tensors, call = arguments
        output = right(paged, *tensors, replace(call, **{argument: None}))
        paged.calls[-1] = call
        return output

    monkeypatch.setattr(PagedPass, "attend", wrong)
    with pytest.raises(ModelError, match="logits differ"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_what_a_model_does_after_its_output_layer_is_done_to_the_wanted_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    runner = load(build_tiny(tmp_path, family))
    head = runner._model.get_output_embeddings()
    seen = []
    head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    plan = build_plan(
        [Rows([5, 6, 7, 8, 9], 0, [0], 2)], 16, runner.kv.zero_slot, head.weight.device
    )
    with torch.inference_mode():
        logits = run_pass(runner._model, plan, runner.kv)
    assert [output.shape for output in seen] == [(1, 2, 288)]
    assert logits.shape == (2, 288)
    assert (logits - seen[0][0]).abs().max() > 0.1
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = plain(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, -2:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


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
