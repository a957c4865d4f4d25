"""Preparing a known model, end to end on a tiny one: real pip, real wheel, real conversion."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pilotfish_workers import default_pair
from pilotfish_workers.default_pair_catalog import (
    DEFAULT,
    KNOWN_MODELS,
    RECEIPT,
    DefaultPairError,
    KnownModel,
    is_complete,
    models_folder,
    write_receipt,
)
from pilotfish_workers.default_pair_progress import Reporter

HEADS, KV_HEADS, HEAD, HIDDEN, FFN, LAYERS = 4, 2, 16, 64, 96, 2
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary with one merge: two spaces."""
    from tokenizers.pre_tokenizers import ByteLevel

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return [*specials, *sorted(ByteLevel.alphabet()), "ĠĠ"], ["Ġ Ġ"]


def tiny_llama() -> Any:
    """A random Llama with tied embeddings whose weights are all exact in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocabulary()[0]),
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():  # not the model as a whole: that would round the rope too
        weight.data = weight.data.to(torch.bfloat16).float()
    return model


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight"}.get(name, "output_norm.weight")
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def interleave(weight: Any, heads: int) -> Any:
    """GGUF keeps the two halves of each rotary head interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, *, pre_tokenizer: str = "smollm") -> None:
    import gguf
    import numpy

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens, merges = vocabulary()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = interleave(weight, HEADS if "q_proj" in name else KV_HEADS)
        if name != "lm_head.weight":
            writer.add_tensor(gguf_name(name), numpy.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, gguf: Path) -> KnownModel:
    """A wheel that pip accepts, and what the catalogue would say of it."""
    name = "tiny_llm-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\n"
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.write(gguf, "tiny_llm/tiny.gguf")
        archive.writestr("tiny_llm-1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_llm-1.0.dist-info/WHEEL", tag)
        archive.writestr("tiny_llm-1.0.dist-info/RECORD", "")
    data = (folder / name).read_bytes()
    return KnownModel(
        name="Tiny",
        package="tiny-llm",
        version="1.0",
        wheel=name,
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        wheel_bytes=len(data),
        member="tiny_llm/tiny.gguf",
        member_bytes=gguf.stat().st_size,
        folder_bytes=gguf.stat().st_size,
        licence="Apache-2.0",
        origin="a test",
    )


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def index(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, KnownModel]:
    """A folder that pip can install from, with the tiny model's wheel in it."""
    folder = tmp_path_factory.mktemp("index")
    gguf = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(gguf, llama)
    return folder, write_wheel(folder, gguf)


@pytest.fixture
def offline(index: tuple[Path, KnownModel], monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """pip sees only the folder of `index`."""
    for name in ("PILOTFISH_INDEX_URL", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index[0]))
    return index[1]


@pytest.fixture(scope="module")
def prepared(
    index: tuple[Path, KnownModel], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The tiny model prepared once, and what was said meanwhile."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(index[0]))
        root = tmp_path_factory.mktemp("cache")
        return default_pair.prepare(index[1], root, Reporter(said)), said.getvalue()


def test_the_prepared_model_computes_what_the_original_does(
    prepared: tuple[Path, str], llama: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(prepared[0], dtype=torch.float32).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, llama(ids).logits)


def test_the_prepared_folder_is_bf16_with_the_embeddings_stored_once(
    prepared: tuple[Path, str],
) -> None:
    from safetensors import safe_open

    config = json.loads((prepared[0] / "config.json").read_text())
    with safe_open(prepared[0] / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (no mapping)
        assert file.get_slice("model.norm.weight").get_dtype() == "BF16"
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "bfloat16"


def test_the_end_token_and_the_chat_template_come_from_the_file(
    prepared: tuple[Path, str],
) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(prepared[0])
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.model_max_length == 128
    generation = GenerationConfig.from_pretrained(prepared[0])
    assert (generation.bos_token_id, generation.eos_token_id) == (1, 2)
    assert not generation.do_sample


def test_spaces_before_a_digit_stay_together(prepared: tuple[Path, str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared[0])
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_size_time_and_disk_are_said_before_anything_is_downloaded(
    prepared: tuple[Path, str],
) -> None:
    first, *rest = prepared[1].splitlines()
    assert "MB to download" in first
    assert "of disk" in first
    assert any("100 %" in line for line in rest)


def test_nothing_but_the_folder_and_its_lock_is_left(prepared: tuple[Path, str]) -> None:
    assert sorted(path.name for path in prepared[0].parent.iterdir()) == [".Tiny.lock", "Tiny"]


def test_a_complete_folder_is_used_without_a_download(
    prepared: tuple[Path, str], offline: KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    said = io.StringIO()
    assert default_pair.prepare(offline, prepared[0].parent, Reporter(said)) == prepared[0]
    assert said.getvalue() == ""


@pytest.mark.slow
def test_two_at_once_make_one_folder(offline: KnownModel, tmp_path: Path) -> None:
    code = (
        "import json, sys; from pathlib import Path\n"
        "from pilotfish_workers.default_pair import prepare\n"
        "from pilotfish_workers.default_pair_catalog import KnownModel\n"
        "from pilotfish_workers.default_pair_progress import Reporter\n"
        "known = KnownModel(**json.loads(sys.argv[1]))\n"
        "print(prepare(known, Path(sys.argv[2]), Reporter()))\n"
    )
    arguments = [sys.executable, "-c", code, json.dumps(dataclasses.asdict(offline)), str(tmp_path)]
    both = [
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    replies = [child.communicate(timeout=200) for child in both]
    assert [child.returncode for child in both] == [0, 0], replies
    assert {out.strip() for out, _ in replies} == {str(tmp_path / "Tiny")}
    assert sum("converting" in err for _, err in replies) == 1
    assert is_complete(tmp_path / "Tiny", offline)


@pytest.mark.slow
def test_a_half_done_folder_is_made_again(
    offline: KnownModel, index: tuple[Path, KnownModel], tmp_path: Path
) -> None:
    folder, staging = tmp_path / "Tiny", tmp_path / ".Tiny.partial"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    (staging / "model").mkdir(parents=True)
    (staging / offline.wheel).write_bytes((index[0] / offline.wheel).read_bytes()[:100])
    default_pair.prepare(offline, tmp_path, Reporter(io.StringIO()))
    assert is_complete(folder, offline)
    assert not staging.exists()


def test_a_file_of_another_hash_is_refused_and_removed(offline: KnownModel, tmp_path: Path) -> None:
    expected = dataclasses.replace(offline, wheel_sha256="0" * 64)
    with pytest.raises(DefaultPairError, match="SHA-256"):
        default_pair.prepare(expected, tmp_path, Reporter(io.StringIO()))
    assert not (tmp_path / ".Tiny.partial" / offline.wheel).exists()
    assert not (tmp_path / "Tiny").exists()


def test_without_a_network_the_advice_names_both_ways(
    offline: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DefaultPairError, match=r"(?s)pip: ERROR.*direct download.*--target"):
        default_pair.prepare(offline, tmp_path, Reporter(io.StringIO()))


def test_a_disk_too_small_is_refused_before_the_download(
    offline: KnownModel, tmp_path: Path
) -> None:
    huge = dataclasses.replace(offline, folder_bytes=1 << 60)
    with pytest.raises(DefaultPairError, match="PILOTFISH_CACHE"):
        default_pair.prepare(huge, tmp_path, Reporter(io.StringIO()))
    assert list((tmp_path / ".Tiny.partial").iterdir()) == []


def test_a_cache_that_is_a_file_is_explained(offline: KnownModel, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(DefaultPairError, match="cache"):
        default_pair.prepare(offline, tmp_path / "cache" / "models", Reporter(io.StringIO()))


def test_an_unknown_pre_tokenizer_is_refused_by_name(llama: Any, tmp_path: Path) -> None:
    from pilotfish_workers.gguf_convert import main

    write_gguf(tmp_path / "other.gguf", llama, pre_tokenizer="tekken")
    assert main([str(tmp_path / "other.gguf"), str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_resolves_to_itself_and_a_hub_id_is_left_alone(tmp_path: Path) -> None:
    assert default_pair.resolve(str(tmp_path)) == str(tmp_path)
    assert default_pair.resolve("HuggingFaceTB/SmolLM2-135M") == "HuggingFaceTB/SmolLM2-135M"


@pytest.mark.parametrize("path", ["./no-such-model", "/no/such/model", "~/no-such-model"])
def test_a_path_that_does_not_exist_is_refused(path: str) -> None:
    with pytest.raises(DefaultPairError, match="no model folder"):
        default_pair.resolve(path)


@pytest.mark.parametrize("name", ["default", DEFAULT.name])
def test_a_known_name_resolves_to_its_prepared_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path))
    with pytest.raises(DefaultPairError, match="models pull"):
        default_pair.resolve(name, pull=False)
    folder = tmp_path / "models" / DEFAULT.name
    folder.mkdir(parents=True)
    write_receipt(folder, DEFAULT)
    assert default_pair.resolve(name) == str(folder)


def test_a_folder_that_lost_a_byte_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    write_receipt(tmp_path, DEFAULT)
    assert is_complete(tmp_path, DEFAULT)
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert not is_complete(tmp_path, DEFAULT)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', "\x00"])
def test_a_receipt_that_makes_no_sense_is_not_complete(text: str, tmp_path: Path) -> None:
    (tmp_path / RECEIPT).write_text(text)
    assert not is_complete(tmp_path, DEFAULT)


def test_the_cache_follows_the_environment() -> None:
    assert models_folder({"PILOTFISH_CACHE": "/a"}) == Path("/a/models")
    assert models_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/pilotfish/models")
    # the XDG specification says that a relative value is to be ignored
    assert models_folder({"XDG_CACHE_HOME": "b"}) == Path.home() / ".cache/pilotfish/models"


def test_path_prints_nothing_but_the_folder_and_fails_without_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pilotfish_workers.default_pair", "path"]
    environ = os.environ | {"PILOTFISH_CACHE": str(tmp_path)}
    missing = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "pilotfish models pull" in missing.stderr
    folder = tmp_path / "models" / DEFAULT.name
    folder.mkdir(parents=True)
    write_receipt(folder, DEFAULT)
    found = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{folder}\n", "")


def test_importing_the_module_loads_no_model_library() -> None:
    code = (
        "import sys, pilotfish_workers.default_pair\n"
        "print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_known_name_leads_to_a_model_that_says_its_licence() -> None:
    assert set(KNOWN_MODELS) == {"default", DEFAULT.name}
    assert {known.licence for known in KNOWN_MODELS.values()} == {"Apache-2.0"}
