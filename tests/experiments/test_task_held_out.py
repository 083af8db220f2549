"""Task `held_out`: the head is fitted on half of the training file; the stream is all the rest."""

from pathlib import Path
from typing import Any

import pytest

from experiments.support.files import Folders
from experiments.tasks import build, make_task
from experiments.tasks.held_out import divide
from llmcache.errors import ConfigError
from tests.experiments.measuring import desk

TASK: dict[str, Any] = {"name": "held_out", "model": "untrained", "data": {"path": "set", "order": "shuffled"}}
N_TRAIN, N_TEST = 80, 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `set/train.csv`, `set/test.csv` and another file beside them."""
    requests = desk(N_TRAIN + N_TEST, "order_status", "cancel_order")
    parts = {"train": requests[:N_TRAIN], "test": requests[N_TRAIN:], "valid": requests}
    for name, part in parts.items():
        path = tmp_path / "set" / f"{name}.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("text,label\n" + "".join(f'"{name} {x.text}",{x.label}\n' for x in part), encoding="utf-8")
    return tmp_path


def texts(folder: Path, seed: int = 0, **changes: Any) -> list[str]:
    _, asked = divide(make_task(TASK | changes), Folders(folder), seed)
    return [request.text for request in asked]


def test_the_stream_is_half_of_train_and_all_of_test_and_the_head_is_fitted_on_the_rest(folder: Path) -> None:
    workload = build(make_task(TASK), Folders(folder), 0)
    asked = [request.text for request in workload.requests]
    assert asked == texts(folder) and len(asked) == N_TRAIN // 2 + N_TEST
    assert sum(text.startswith("train") for text in asked) == N_TRAIN // 2
    assert sum(text.startswith("test") for text in asked) == N_TEST
    assert len({text.split()[0] for text in asked[:20]}) == 2  # mixed, not one file after the other
    known, rest = divide(make_task(TASK), Folders(folder), 0)
    assert len(known) == workload.facts["n_fit"] == N_TRAIN // 2
    assert {one.id for one in known}.isdisjoint(one.id for one in rest)


def test_requests_may_arrive_in_bursts_or_again(folder: Path) -> None:
    plain = texts(folder)
    again = texts(folder, arrival={"name": "repeats", "n": 50})
    assert len(again) == 50 and len(set(again)) < 50 and set(again) <= set(plain)
    bursts = texts(folder, arrival={"name": "bursts", "length": 3, "at_once": 1})
    assert sorted(bursts) == sorted(plain) and bursts != plain
    with pytest.raises(ConfigError, match=r"task.arrival.name"):
        make_task(TASK | {"arrival": {"name": "late"}})
    repeats = make_task(TASK | {"arrival": {"name": "repeats", "n": 50}})
    assert (make_task(TASK).title, repeats.title) == ("set", "set-repeats")
