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
from pilotfish_workers.speculative.accept import Outcome
from pilotfish_workers.speculative.best import best_tokens
from pilotfish_workers.speculative.draw import draw_tokens
from pilotfish_workers.speculative.judge import judge
from pilotfish_workers.speculative.sampler import Case, Draw, Drawn

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

    @torch.inference_mode()
    def greedy(self, rows: Sequence[Rows]) -> list[list[int]]:
        """One packed pass; see `Model.greedy`."""
        best = best_tokens(self.forward(rows))
        result, start = [], 0
        for row in rows:
            mine = best[start : start + row.num_logits]
            start += row.num_logits
            if BAD_LOGITS in mine[:-1]:
                mine = best_tokens(self._stepwise(row, 1))
            result.append(mine)
        return result

    @torch.inference_mode()
    def verify(self, rows: Sequence[Rows], cases: Sequence[Case | None]) -> list[Outcome | None]:
        """One packed pass as the target; see `Model.verify`."""
        logits = self.forward(rows)
        best = best_tokens(logits)
        start = 0
        for row, case in zip(rows, cases, strict=True):
            end = start + row.num_logits
            num_drafted = 0 if case is None else len(case.drafted)
            if num_drafted and BAD_LOGITS in best[start : end - 1]:
                logits[start:end] = self._stepwise(row, row.num_logits - num_drafted)
                best[start:end] = best_tokens(logits[start:end])
            start = end
        return judge(logits, best, cases, [row.num_logits for row in rows])

    @torch.inference_mode()
    def draw(self, rows: Sequence[Rows], draws: Sequence[Draw | None]) -> list[Drawn | None]:
        """One packed pass as a drafter; see `Model.draw`."""
        wanted = [one for one in draws if one is not None]
        for row, one in zip(rows, draws, strict=True):
            if row.num_logits != (one is not None):
                raise ModelError(f"{row.num_logits} logits for {'no' if one is None else 'a'} draw")
        drawn = iter(draw_tokens(self.forward(rows), wanted))
        return [None if one is None else next(drawn) for one in draws]

    def _stepwise(self, row: Rows, num_sure: int) -> torch.Tensor:
        """The same row's logits `[num_logits, vocab]`, token by token from the `num_sure`-th on.

        In one kernel call NaN of a later token reaches earlier ones through the mask (NaN minus
        infinity is NaN). A drafted token that breaks the model must not fail the job that rejects
        it, so what looks broken is computed again as plain decoding would have done it.
        """
        first = len(row.tokens) - row.num_logits + num_sure
        parts = [self.forward([Rows(row.tokens[:first], row.start, row.blocks, num_sure)])]
        for index in range(first, len(row.tokens)):
            if best_tokens(parts[-1])[-1] == BAD_LOGITS:
                # every later token attends to this one
                rest = (len(row.tokens) - index, self.info.vocab_size)
                parts.append(parts[-1].new_full(rest, torch.nan))
                break
            step = Rows(row.tokens[index : index + 1], row.start + index, row.blocks, 1)
            parts.append(self.forward([step]))
        return torch.cat(parts)

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
