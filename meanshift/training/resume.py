"""What a run saves and takes up again, whatever the number of processes before and after."""

from __future__ import annotations

from typing import Any

from meanshift.methods import MeanShift
from meanshift.runtime import checkpoint, distributed
from meanshift.runtime.run_directory import RunDirectory


def save(
    journal: RunDirectory, state: dict[str, Any], method: MeanShift, *, keep_steps: int = 0
) -> None:
    """Write the state of a step, once; of a bank in parts each process writes its own."""
    bank, step, world = method.bank, state["step"], distributed.world_size()
    state["method"] = method.state_dict()
    if bank is not None and bank.sharded:
        with distributed.fail_together():  # all parts are there before the file that needs them
            checkpoint.save_part(journal.checkpoints, step, distributed.rank(), world, bank.part())
        state["parts"] = world
        state["method"] = {n: held for n, held in state["method"].items() if not in_bank(n)}
    if journal.writes:
        checkpoint.save(journal.checkpoints, state, keep_steps=keep_steps)


def load(method: MeanShift, state: dict[str, Any], journal: RunDirectory) -> None:
    """Weights and bank, from whatever number of processes they were saved."""
    held = dict(state["method"])
    if "parts" in state:
        held |= {name: own for name, own in method.state_dict().items() if in_bank(name)}
    method.load_state_dict(held)
    for part in checkpoint.parts(journal.checkpoints, state):
        assert method.bank is not None
        method.bank.put(part)


def in_bank(name: str) -> bool:
    return name in ("bank.rows", "bank.ids", "bank.labels")


def refuse_different(journal: RunDirectory, what: str, own: str | int) -> None:
    """Processes on several machines must see the same images and the same run."""
    seen = distributed.all_gather_list([own])
    if len(set(seen)) > 1:
        other = next(r for r, one in enumerate(seen) if one != seen[0])
        raise distributed.SharedError(
            f"{journal.folder}: process {other} sees other {what} than process 0; need the "
            f"images and the run on disks that all of them share"
        )


def refuse_other_images(journal: RunDirectory, was: str, now: str, size: int) -> None:
    if was != now:
        raise ValueError(
            f"{journal.folder}: was trained on other images than the {size} that are there now "
            f"(fingerprint {was}, now {now}); restore them or choose another --out"
        )


def describe_change(was: dict[str, Any], now: dict[str, Any]) -> str:
    then, here = (", ".join(f"{name} {value}" for name, value in m.items()) for m in (was, now))
    return f"continues with {here} after {then}: not bit for bit the same"
