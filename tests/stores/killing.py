"""Kills a process at random moments while it writes to a disk store, then checks the folder.

Each writer puts values of all sizes in batches, purges now and then, and reports calls that returned. After the kill,
the folder is opened again: every value must be right, none may predate a purge that returned, and, where all values
fit, none may be missing.
"""

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from llmcache.memory.stores import Put, StoreKey
from llmcache.memory.stores.disk import DiskStore
from llmcache.memory.stores.seal import Seal

SEAL = Seal(b"secret")
SIZES = (10, 2_000, 9_000, 200_000)  # floats: in the index, at its limit, in files
N_KEYS = 60


@dataclass
class Place:
    """A folder, and the values that it must hold."""

    folder: Path
    max_bytes: int
    must: set[int] = field(default_factory=set)
    tag: int = 0  # written with values; each purge raises it
    least: int = 0  # lowest tag that no purge has removed


def key(number: int) -> StoreKey:
    return StoreKey("a", "0" * 64, f"{number}")


def value(number: int, tag: int) -> dict[str, torch.Tensor]:
    return {"h": torch.full((SIZES[number % len(SIZES)],), float(number)), "tag": torch.tensor(tag)}


def write(place: Place, seed: int, say: int) -> None:
    """Put and purge forever; report calls that returned as `put NUMBER` and `purged`."""
    chance, store, tag = random.Random(seed), DiskStore(str(place.folder), place.max_bytes), place.tag
    while True:
        if chance.random() < 0.05:
            os.write(say, b"purging\n")
            store.purge("a")
            tag += 1
            os.write(say, b"purged\n")
        numbers = chance.sample(range(N_KEYS), chance.randint(1, 6))
        since, (number,) = store.purges(None).cursor, store.numbers(["a"])
        store.put_many([Put(key(n), SEAL.close(key(n), 0, value(n, tag), {}), number, since) for n in numbers])
        os.write(say, "".join(f"put {n}\n" for n in numbers).encode())


def kill(place: Place, seed: int, after_s: float) -> None:
    """Kill a writer `after_s` after its first report, and record its reports."""
    listen, say = os.pipe()
    if (process := os.fork()) == 0:
        try:
            write(place, seed, say)
        finally:
            os._exit(1)
    os.close(say)
    with os.fdopen(listen) as told:
        first = told.readline()
        time.sleep(after_s)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        *lines, _ = (first + told.read()).split("\n")  # the last one may be cut
    for line in lines:
        what, _, number = line.partition(" ")
        if what == "put":
            place.must.add(int(number))
        elif what == "purging":
            place.must.clear()  # the purge may have happened
        else:
            place.tag += 1
            place.least = place.tag
    place.tag += lines.count("purging") - lines.count("purged")  # the next writer's tags differ


def look(place: Place) -> dict[str, int]:
    """Open the folder; count values found, wrong, from before a purge, and missing."""
    store, found, counts = DiskStore(str(place.folder), place.max_bytes), set(), {"wrong": 0, "purged": 0}
    for number, held in enumerate(store.get_many([key(n) for n in range(N_KEYS)], time.monotonic() + 60)):
        if held is not None:
            tensors = SEAL.open(key(number), 0, held).tensors
            counts["wrong"] += not torch.equal(tensors["h"], value(number, 0)["h"])
            counts["purged"] += int(tensors["tag"]) < place.least
            found.add(number)
    files = {path.name for path in (place.folder / "values").iterdir() if path.suffix != ".part"}
    stats, n_files = store.stats(), sum(n % len(SIZES) > 1 for n in found)
    is_counted = (stats.n_values, len(files)) == (len(found), n_files) and stats.nbytes <= place.max_bytes
    store.close()
    n_missing = len(place.must - found) if place.max_bytes > 1 << 29 else 0
    return counts | {"found": len(found), "missing": n_missing, "miscounted": not is_counted}


def check(root: Path, times: int) -> Counter[str]:
    """Kill this many writers; return the counts of all looks."""
    places = [Place(root / "roomy", 1 << 30), Place(root / "tight", 4 << 20)]
    draw, totals = random.Random(0), Counter[str]()
    torch.set_num_threads(1)
    for number in range(times):
        kill(places[number % 2], draw.randrange(2**32), draw.expovariate(1 / 0.02))
        totals.update(look(places[number % 2]))
    return totals
