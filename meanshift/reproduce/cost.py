"""The cost of the search by the size of the bank: the paper's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meanshift.config import Config
from meanshift.methods.memory_bank import MemoryBank
from meanshift.reproduce.laps import Laps
from meanshift.reproduce.step import Contender
from meanshift.runtime.run_directory import environment

SIZES = (1_024, 4_096, 16_384, 65_536, 131_072)
"""banks that `meanshift bench cost` searches, beside the run's own"""


def bench_cost(config: Config, *, rounds: int, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """The search's share of a step by the size of the bank: a result with its figures and card."""
    method, batch = config.method, config.train.batch_size
    if rounds < 1:
        raise ValueError(f"--rounds: got {rounds}, need 1 or more")
    if method.k < 2 or method.symmetric:
        raise ValueError(
            f"bench cost measures the search of the asymmetric step; got k {method.k}, symmetric "
            f"{method.symmetric}: need --method.k 2 or more, without --method.symmetric"
        )
    without = replace(config, method=replace(method, k=1, k_start=1))  # the same step, no bank
    contender, laps = Contender(without), dict[int, Laps]()
    sizes = sorted({size for size in sizes if size >= max(batch, method.k)} | {method.bank_size})
    dim, dtype = contender.method.dim, getattr(torch, method.bank_dtype)
    bank = MemoryBank(sizes[-1], dim, dtype=dtype).to(contender.device)
    queries = torch.nn.functional.normalize(torch.randn(batch, dim, device=bank.rows.device), dim=1)
    own = torch.arange(batch, device=queries.device)

    def search() -> Tensor:
        skip = own if method.same_image == "skip" else None
        slots, _ = bank.search(
            queries, method.k - 1, leave_out=own, skip_ids=skip, filled_only=True
        )
        return bank.rows[slots].to(queries.dtype)

    rest = Laps()
    for turn in range(rounds + 1):
        if turn == 1:  # the first turn allocates
            rest, laps = Laps(), {}
        contender.step(rest)
        for size in sizes:
            bank.written = size  # searched as far as it is filled
            laps.setdefault(size, Laps()).time("search", search)
    step = sum(rest.medians().values())
    table = []
    for size in sizes:
        took = laps[size].medians()["search"]
        gflops, memory = 2e-9 * size * dim * batch, size * dim * bank.rows.element_size()
        share = took / (took + step)
        table.append({"bank": size, "share": share, "gflops": gflops, "bytes": memory})
    card = {
        "protocol": "cost",
        "settings": {
            "table": table, "bank": method.bank_size, "dtype": method.bank_dtype, "dim": dim,
            "k": method.k, "batch": batch, "image_size": config.data.image_size,
            "encoder": f"{config.encoder.name} {config.encoder.stem} x{config.encoder.width:g}",
            "rounds": rounds, "share": "search and gather / (search and gather + the other phases)",
        },
        "device": str(contender.device),
        "precision": str(contender.precision),
        "threads": torch.get_num_threads(),
        **environment(),
    }  # fmt: skip
    return {
        "figures": {f"bank {row['bank']}, %": 100 * row["share"] for row in table},
        "card": card,
    }


def describe_cost(result: Mapping[str, Any]) -> str:
    """The cost table in words."""
    card, settings = result["card"], result["card"]["settings"]
    lines = [
        f"{settings['encoder']}, {settings['image_size']} px, batch {settings['batch']}, "
        f"k {settings['k']}, {settings['dim']} dimensions, {card['device']}, "
        f"{card['threads']} threads, median of {settings['rounds']} rounds",
        "",
        f"  {'bank':>9}{'share of the step':>20}{'GFLOPs a batch':>17}{'MB':>9}",
    ]
    lines += [
        f"  {row['bank']:>9,}{row['share']:>20.2%}{row['gflops']:>17.2f}{row['bytes'] / 1e6:>9.1f}"
        for row in settings["table"]
    ]
    return "\n".join(lines)
