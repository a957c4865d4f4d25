"""A transformers model behind the `Model` interface: paged KV, one packed pass a call."""

from collections.abc import Sequence
from typing import Any

import torch

from pilotfish_workers.model import gate as model_gate
from pilotfish_workers.model.block_pool import BlockPool
from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.fingerprint import model_fingerprint
from pilotfish_workers.model.interface import BAD_LOGITS, ModelInfo, Rows
from pilotfish_workers.model.kv_pool import KvPool, token_bytes
from pilotfish_workers.model.loading import (
    context_length_of,
    eos_ids_of,
    load_config,
    load_model,
    resolve_device,
    resolve_dtype,
)
from pilotfish_workers.model.memory import default_kv_tokens
from pilotfish_workers.model.packed_pass import run_pass
from pilotfish_workers.model.pass_plan import build_plan

__all__ = ["ModelRunner"]


class ModelRunner:
    """Runs packed passes. One owner thread; `load` is the way to make one."""

    def __init__(self, model: Any, info: ModelInfo, kv: KvPool, pool: BlockPool) -> None:
        self.info = info
        self.pool = pool
        self.kv = kv
        self._model = model
        self._device = torch.device(info.device)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        name: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        num_threads: int | None = None,
        kv_tokens: int | None = None,
        block_size: int = 16,
        gate: bool = True,
    ) -> "ModelRunner":
        """Load a model folder or hub id and check that it is served exactly.

        `kv_tokens` sizes the KV pool; None takes a share of the free memory. `num_threads` sets
        torch's threads for the whole process. `ModelError` says why a model cannot be served.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        config = load_config(path)
        model_gate.check_config(config)
        where = resolve_device(device)
        kind = resolve_dtype(dtype, config, where)
        loaded = load_model(path, config, kind, where)
        shapes = model_gate.probe(loaded.model, where)
        context_length = context_length_of(config)
        if kv_tokens is None:
            kv_tokens = default_kv_tokens(token_bytes(shapes, kind), context_length, where)
        pool = BlockPool(max(1, kv_tokens // block_size), block_size)
        dtype_name = str(kind).removeprefix("torch.")
        info = ModelInfo(
            name=name or path,
            path=path,
            family=config.model_type,
            vocab_size=loaded.model.get_output_embeddings().weight.shape[0],
            context_length=context_length,
            num_layers=len(shapes),
            dtype=dtype_name,
            device=str(where),
            fingerprint=model_fingerprint(loaded.folder, dtype_name),
            eos_ids=eos_ids_of(loaded.model),
        )
        kv = KvPool(shapes, pool.num_blocks * block_size, kind, where)
        runner = cls(loaded.model, info, kv, pool)
        if gate:
            model_gate.check_exact(loaded.model, info, shapes)
        return runner

    @torch.inference_mode()
    def forward(self, rows: Sequence[Rows]) -> torch.Tensor:
        """One packed, ragged pass: logits `[sum of num_logits, vocab]` in the model's dtype.

        KV of every token is in the pool afterwards. `ModelError` for rows that cannot be run.
        """
        for row in rows:
            self._check(row)
        if not rows:
            return torch.empty(0, self.info.vocab_size, device=self._device)
        plan = build_plan(rows, self.pool.block_size, self.kv.zero_slot, self._device)
        return run_pass(self._model, plan, self.kv)

    def greedy(self, rows: Sequence[Rows]) -> list[list[int]]:
        """One packed pass; see `Model.greedy`."""
        results = self._greedy_once(rows)
        for number, row in enumerate(rows):
            if row.num_logits > 1 and BAD_LOGITS in results[number]:
                results[number] = self._greedy_stepwise(row)
        return results

    @torch.inference_mode()
    def _greedy_once(self, rows: Sequence[Rows]) -> list[list[int]]:
        logits = self.forward(rows)
        if logits.shape[0] == 0:
            return [[] for _ in rows]
        best = logits.argmax(dim=-1, keepdim=True)
        # argmax ranks NaN highest, then +inf: if the best one is finite, all logits are usable
        is_usable = logits.gather(1, best).isfinite()
        ids = torch.where(is_usable, best, BAD_LOGITS).squeeze(1).tolist()
        results = []
        for row in rows:
            results.append(ids[: row.num_logits])
            ids = ids[row.num_logits :]
        return results

    def _greedy_stepwise(self, row: Rows) -> list[int]:
        """The same row, token by token.

        In one kernel call NaN of a later token reaches earlier ones through the mask (NaN minus
        infinity is NaN). A drafted token that breaks the model must not fail the job that rejects
        it, so what looks broken is judged again as plain decoding would have seen it.
        """
        first = len(row.tokens) - row.num_logits + 1
        result: list[int] = []
        for begin, end in [(0, first), *((i, i + 1) for i in range(first, len(row.tokens)))]:
            part = Rows(row.tokens[begin:end], row.start + begin, row.blocks, 1)
            result += self._greedy_once([part])[0]
            if result[-1] == BAD_LOGITS:
                break  # every later token attends to this one
        return result + [BAD_LOGITS] * (row.num_logits - len(result))

    def _check(self, row: Rows) -> None:
        end = row.start + len(row.tokens)
        if not row.tokens or row.start < 0 or not 0 <= row.num_logits <= len(row.tokens):
            raise ModelError(f"not a row: {len(row.tokens)} tokens, {row.num_logits} logits")
        if end > self.info.context_length:
            raise ModelError(f"{end} tokens exceed the context of {self.info.context_length}")
        if len(row.blocks) * self.pool.block_size < end:
            raise ModelError(f"{len(row.blocks)} blocks do not cover {end} tokens")
        if min(row.tokens) < 0 or max(row.tokens) >= self.info.vocab_size:
            raise ModelError(f"token ids must lie in 0 … {self.info.vocab_size - 1}")
