"""Every method, live and replayed: what it serves, from which source, and with which answer."""

from dataclasses import replace
from functools import cache
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from experiments.measures.base import serve_once
from experiments.measures.serve import measure
from experiments.methods import METHODS, MethodSettings
from experiments.methods.base import COMPUTED, twin
from experiments.methods.cached import Cached
from experiments.models.loading import UNTRAINED, encode, load
from experiments.replay.recording import Recording, make_fingerprint
from experiments.replay.replay import by_request, replay, rows_served
from experiments.support.files import Folders
from experiments.tasks import build, make_task
from llmcache import LLMCache
from llmcache.errors import ConfigError

TASKS: dict[str, dict[str, Any]] = {
    "openbookqa": {"data": "made", "limit": 20},
    "squad_v2": {"data": "made", "limit": 20, "max_length": 128},
    "stream": {"limit": 40, "data": {"path": "support_desk", "limit": 200}, "head": {"pool": "cls"}},
    "wikitext": {"data": "made", "window": 16, "limit": 24, "repeats": {}},
}
PCA = {"name": "pca", "dim": 4, "fit_on": 10}
SEMANTIC = {"threshold": 0.9, "encoder": UNTRAINED}


@cache
def recorded(name: str) -> Recording:
    return Recording(build(make_task({"name": name, "model": UNTRAINED, **TASKS[name]}), Folders(), 0))


@pytest.mark.parametrize(
    ("method", "name", "options"),  # some rows hit with these options, and not all
    [
        *(
            ("llmcache", name, {"tau": tau, "fingerprint": fingerprint})
            for name, fingerprint, tau in (
                ("stream", "mean", 0.8),
                ("openbookqa", "simhash", 0.6),
                ("squad_v2", "attention", 0.8),
                ("stream", PCA, 0.5),
                ("wikitext", "minhash", 0.1),
            )
        ),
        *(("doccache", name, {"threshold": 0.6}) for name in TASKS),
        ("semantic_response", "stream", SEMANTIC),
        ("exact_response", "stream", {}),
        ("exact_response", "wikitext", {}),
        ("nocache", "stream", {}),
    ],
)
def test_a_replay_equals_a_live_run(method: str, name: str, options: dict[str, Any]) -> None:
    recording, workload = recorded(name), recorded(name).workload
    numbers = range(len(workload.requests))
    if method == "llmcache":
        live: Any = Cached(
            workload, {"layers": "last", "allow_unsafe": True, "payload": workload.payload or "auto"} | options
        )
        live.begin()
        units = recording.rows(make_fingerprint(options["fingerprint"]), live.payload != "sequence")
        read, threshold = recording.reread, options["tau"]
    else:
        live = METHODS[method](workload, options)
        read, threshold = recording.borrowed, options.get("threshold", inf)
        if method == "doccache":
            units, read = recording.documents(), recording.handed
        elif method == "semantic_response":
            units = recording.texts(UNTRAINED)
        else:
            units = recording.rows(make_fingerprint("mean"), fits_any_length=True)
    told, notes = serve_once(live, numbers)
    held, ran = (live.nbytes, live.n_entries), list[int]()
    if method == "doccache":
        live._recall.trunk.register_forward_hook(lambda *_: ran.append(1))
    assert serve_once(live, numbers)[1] == notes and (live.nbytes, live.n_entries) == held  # a round begins cold
    if method == "nocache":
        assert held == (None, None) and {note.by for note in notes} == {COMPUTED} and told == recording.answers
        return
    (again,) = replay(units, [threshold])
    assert (by_request(units, again) != COMPUTED).tolist() == [note.is_hit for note in notes]
    assert rows_served(again) == pytest.approx(np.mean([note.share * note.is_hit for note in notes]))
    assert {COMPUTED} < set(again.served)
    assert not any(workload.is_changed(*pair) for pair in zip(told, read(units, again), strict=True))
    if method != "llmcache":
        assert [note.source for note in notes if note.is_hit] == again.source[again.served != COMPUTED].tolist()
        assert min(held) > 0 and (not ran or len(ran) == sum(not note.is_hit for note in notes))


def test_methods_share_weights_and_nothing_else() -> None:
    workload = recorded("stream").workload
    parameters = dict(workload.module.named_parameters())
    assert all(parameter is parameters[name] for name, parameter in twin(workload.module).named_parameters())
    options = {"semantic_response": SEMANTIC}
    methods = [METHODS[name](workload, options.get(name, {})) for name in METHODS]
    with LLMCache.wrap(twin(workload.module)), torch.inference_mode():
        for method in methods:
            method.begin()
            method.ask(0)
        assert [method.last().by for method in methods] == [COMPUTED] * len(methods)
        assert not any("forward" in vars(part) for part in workload.module.modules())
    for method in methods:
        method.end()


def test_bypasses_and_evictions_are_told_apart() -> None:
    workload = recorded("stream").workload
    blank = replace(workload.requests[0], inputs=encode(workload.tokenizer, "", 48))
    asked = workload.of([blank, *workload.requests[:3]])
    trace = measure(asked, {"x": Cached(asked, {"max_entries": 2})}, 1, 0)["x"]
    assert trace.served.tolist() == [["bypassed", "computed", "computed", "computed"]]
    assert trace.evicting.tolist() == [[False, False, False, True]] and trace.n_entries == 2


@pytest.mark.parametrize(
    ("settings", "task", "error"),
    [
        ({"method": "llmcache", "tau": 0.9, "label": "fast"}, "squad_v2", "fast: tau=0.9 with .*allow_unsafe=True"),
        ({"method": "llmcache", "payload": "mean"}, "stream", "llmcache-payload=mean: payload: the head reads 'cls'"),
        ({"method": "doccache"}, None, "doccache: this method needs a model with a head"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(settings: dict[str, Any], task: str | None, error: str) -> None:
    loaded = load(UNTRAINED)
    bare = SimpleNamespace(module=loaded.model, tokenizer=loaded.tokenizer, payload=None)
    with pytest.raises(ConfigError, match=f"^methods: {error}"):
        MethodSettings.make(settings).build(recorded(task).workload if task else bare)  # type: ignore[arg-type]
