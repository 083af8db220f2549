"""Kill a process that writes to a disk store, at random moments, and look at what it left.

    python -m tests.stores.killing FOLDER --times 200 --seed 0

Each writer puts values of all sizes in batches, purges now and then, and says what has returned. Killed, its folder is
opened again: every value that is found is right, none is from before a purge that had returned, and none is missing
that had been put, where there was room for all. The counts go to the standard output as JSON.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from llmcache.stores import Put, StoreKey
from llmcache.stores.disk import DiskStore
from llmcache.stores.seal import Seal

SEAL = Seal(b"secret")
SIZES = (10, 2_000, 9_000, 200_000)  # floats: in the index, at its limit, in files
N_KEYS = 60
ROOMY, TIGHT = 1 << 30, 4 << 20


def key(number: int) -> StoreKey:
    return StoreKey("a", "0" * 64, f"{number}")


def value(number: int, n_purges: int) -> dict[str, torch.Tensor]:
    return {"h": torch.full((SIZES[number % len(SIZES)],), float(number)), "n_purges": torch.tensor(n_purges)}


def write(folder: str, max_bytes: int, n_purges: int, seed: int, say: int) -> None:
    """Put and purge for good; what has returned is said as `put NUMBER` and `purge`."""
    chance, store = random.Random(seed), DiskStore(folder, max_bytes)
    while True:
        if chance.random() < 0.05:
            os.write(say, b"purging\n")
            store.purge("a")
            n_purges += 1
            os.write(say, b"purged\n")
        numbers = chance.sample(range(N_KEYS), chance.randint(1, 6))
        number = store.numbers(["a"])[0]
        store.put_many([Put(key(n), SEAL.close(key(n), value(n, n_purges), {}), number) for n in numbers])
        os.write(say, "".join(f"put {n}\n" for n in numbers).encode())


def killed(folder: str, max_bytes: int, n_purges: int, seed: int, after_s: float) -> list[str]:
    """What a writer said that was killed so long after it had begun to write."""
    listen, say = os.pipe()
    if (process := os.fork()) == 0:
        try:
            write(folder, max_bytes, n_purges, seed, say)
        finally:
            os._exit(1)
    os.close(say)
    with os.fdopen(listen) as told:
        first = told.readline()
        time.sleep(after_s)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        *lines, _ = (first + told.read()).split("\n")  # the last one may be cut
    return lines


def look(folder: Path, max_bytes: int, must: set[int], least_purges: int) -> dict[str, int]:
    """Open what is left; how many values are found, wrong, from before a purge, and missing."""
    store, found, counts = DiskStore(str(folder), max_bytes), set(), {"wrong": 0, "purged": 0}
    for number, held in enumerate(store.get_many([key(n) for n in range(N_KEYS)], time.monotonic() + 60)):
        if held is not None:
            tensors = SEAL.open(key(number), held).tensors
            n_purges = int(tensors["n_purges"])
            counts["wrong"] += not torch.equal(tensors["h"], value(number, 0)["h"])
            counts["purged"] += n_purges < least_purges
            found.add(number)
    files = {path.name for path in (folder / "values").iterdir() if path.suffix != ".part"}
    stats, n_files = store.stats(), sum(n % len(SIZES) > 1 for n in found)
    is_counted = (stats.n_values, len(files)) == (len(found), n_files) and stats.nbytes <= max_bytes
    counts |= {"found": len(found), "missing": len(must - found), "miscounted": not is_counted}
    store.close()
    return counts


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stores.killing", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(args)
    chance, totals = random.Random(options.seed), dict[str, int]()
    torch.set_num_threads(1)
    for round_ in range(options.times):
        max_bytes = (ROOMY, TIGHT)[round_ % 2]
        folder = options.folder / ("roomy", "tight")[round_ % 2]
        state = folder.with_suffix(".json")
        held: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {"must": [], "tag": 0, "least": 0}
        lines = killed(str(folder), max_bytes, held["tag"], chance.randrange(2**32), chance.expovariate(1 / 0.02))
        must, tag, least, is_purging = set(held["must"]), held["tag"], held["least"], False
        for line in lines:
            what, _, number = line.partition(" ")
            if what == "put":
                must.add(int(number))
            elif what == "purging":
                must, is_purging = set(), True  # it may have happened
            else:
                tag += 1
                least, is_purging = tag, False
        seen = look(folder, max_bytes, must if max_bytes == ROOMY else set(), least)
        tag += is_purging  # values of the next writer are told from those of one that was purging
        state.write_text(json.dumps({"must": sorted(must), "tag": tag, "least": least}))
        for name, n in seen.items():
            totals[name] = totals.get(name, 0) + n
    sys.stdout.write(json.dumps({"times": options.times, **totals}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
