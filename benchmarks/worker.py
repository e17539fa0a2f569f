"""One job in one fresh process: a JSON file in, a JSON file out. Run by `step`, never twice at once.

The modules of a peer are imported by its own job, so that no job's memory or time holds another's.
"""

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import resident_bytes
from benchmarks.measure import Bound, Plan, Session, sample

Job = dict[str, Any]


def bare(job: Job) -> Job:
    """The resident set with torch imported and one small product done, and what torch sees."""
    import torch

    torch.rand(256, 256) @ torch.rand(256, 256)
    gc.collect()
    seen = {"threads": torch.get_num_threads(), "capability": torch.backends.cpu.get_cpu_capability()}
    return {"rss_bytes": resident_bytes(), "torch": seen}


def walls(job: Job) -> Job:
    """How fast this machine reads memory and multiplies, now: what no step and no prefill can beat."""
    import torch

    numbers = torch.ones(job["floats"])
    seconds = sample(numbers.sum, Bound(least=3, most=7, seconds=2.0), time.perf_counter)
    found: Job = {"read_gb_s": [numbers.nbytes / 1e9 / one for one in seconds]}
    side, bound = job["side"], Bound(least=1, most=5, seconds=2.0)
    for name in ("float32", "bfloat16"):
        rows, weight = (torch.rand(side, side).to(getattr(torch, name)) for _ in range(2))
        seconds = sample(partial(torch.nn.functional.linear, rows, weight), bound, time.perf_counter)
        found[f"{name}_gflop_s"] = [2 * side**3 / 1e9 / one for one in seconds]
    return found


def random_gpt2(job: Job) -> Job:
    from benchmarks.peers.transformers_peer import save_random_gpt2

    save_random_gpt2(Path(job["directory"]))
    return {}


def transformers(job: Job) -> Job:
    from benchmarks.peers.transformers_peer import TransformersPeer

    peer = TransformersPeer(Path(job["directory"]), job["dtype"], job["kind"])
    session = Session(peer, job["ids"], _plan(job), job["kind"], time.perf_counter)
    session.run()
    return {**_found(session), "next_ids": _next_ids(peer, job)}


def kvouch(job: Job) -> Job:
    from benchmarks.peers.kvouch_peer import KvouchPeer, chunks_are_equal, load_model
    from kvouch.cache.sizing import cache_bytes

    model = load_model(Path(job["directory"]), job["dtype"], job["kind"])
    equal = chunks_are_equal(model, job["ids"][: job["check_tokens"]])
    peer = KvouchPeer(model)
    session = Session(peer, job["ids"], _plan(job), job["kind"], time.perf_counter)
    session.run()
    return {
        **_found(session),
        "next_ids": _next_ids(peer, job),
        "grade": str(model.grade),
        "chunks_are_equal": equal,
        "arithmetic": asdict(model.weights.arithmetic),
        "path": model.path,
        "weights_bytes": model.weights.nbytes,
        "position_bytes": cache_bytes(model.config, 1, 1, model.dtype),
    }


def memory(job: Job) -> Job:
    """The resident set after loading, a prefill and a few steps, beside the bytes of weights and cache."""
    from benchmarks.peers.kvouch_peer import KvouchPeer, load_model

    model = load_model(Path(job["directory"]), job["dtype"], job["kind"])
    peer, ids = KvouchPeer(model), job["ids"]
    cache = peer.new_cache(len(ids) + job["decode_steps"])
    following = peer.feed(ids, cache)
    for _ in range(job["decode_steps"]):
        following = peer.feed([following], cache)
    gc.collect()
    found = {
        "rss_bytes": resident_bytes(),
        "weights_bytes": model.weights.nbytes,
        "cache_bytes": cache.nbytes,
        "prefill_tokens": len(ids),
        "grade": str(model.grade),
    }
    _trim()
    return {**found, "rss_trimmed_bytes": resident_bytes()}


def load(job: Job) -> Job:
    """How long `import torch` takes, and then `import kvouch` with `kvouch.load`."""
    start = time.perf_counter()
    import torch  # noqa: F401

    middle = time.perf_counter()
    from benchmarks.peers.kvouch_peer import load_model

    load_model(Path(job["directory"]), job["dtype"], job["kind"])
    return {"import_torch_s": middle - start, "load_s": time.perf_counter() - middle}


JOBS: dict[str, Callable[[Job], Job]] = {
    job.__name__: job for job in (bare, walls, random_gpt2, transformers, kvouch, memory, load)
}


def _found(session: Session[Any]) -> Job:
    return {"timings": [asdict(one) for one in session.timings], "untimed": session.untimed}


def _plan(job: Job) -> Plan:
    fields = dict(job["plan"])
    for name in ("decode_bound", "prefill_bound", "warm_bound", "text_bound"):
        fields[name] = Bound(**fields[name])
    for name in ("decode_contexts", "prefill_tokens"):
        fields[name] = tuple(fields[name])
    return Plan(**fields)


def _next_ids(peer: Any, job: Job) -> list[int]:
    """The next id after 4, 8, ..., 32 ids: whether two peers run the same model can be seen from it."""
    if job["round"] > 1:
        return []
    cache = peer.new_cache(32)
    return [peer.feed(job["ids"][start : start + 4], cache) for start in range(0, 32, 4)]


def _trim() -> None:
    """Has the C library give back what it keeps of freed memory, where it can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(JOBS[asked["job"]](asked)))
