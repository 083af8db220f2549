"""The page at `/`: its figures, what it escapes, and how it behaves in a browser, on a desk and on a phone."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx2
import pytest

from llmcache.serving.app import create_app
from llmcache.serving.history import History, Interval
from llmcache.serving.keys import add_key
from llmcache.serving.page import count, duration, percent, size
from llmcache.serving.server import Server
from llmcache.stats import AuditStats, Cost, Health, Stats
from tests.serving.served import make_server
from tests.serving_browser import SIZES, open_browser
from tests.tiny_server import listening, make_app, serving

IDS = [1, 20, 21, 2]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(save=tmp_path / "saved") as server:
        yield server


@pytest.fixture
def address(server: Server) -> Iterator[str]:
    with listening(make_app(server, every_s=0.05)) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        if browser is None:
            pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
        yield browser


class Texts(HTMLParser):
    """What a page shows, element by element; and which elements it is made of."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_data(self, data: str) -> None:
        text = data.replace("\N{NO-BREAK SPACE}", " ").strip()
        self.texts += [text] if text else []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def shown(address: str) -> str:
    return " ".join(Texts(httpx2.get(f"{address}/admin/figures").raise_for_status().text).texts)


class Ticking:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_shows_figures_of_the_cache(server: Server, address: str) -> None:
    for ids in (IDS, IDS, IDS, [*IDS, 5]):
        httpx2.post(f"{address}/predict", json=ids)
    text = shown(address)
    assert "Hit rate 50.0 % of 4 requests" in text and "2 requests known" in text
    assert "bank of layer 2" in text and "bank of layer 3" in text and "536.9 MB" in text
    assert "/predict 4" in text and "Health good ready" in text and "Nothing is reused approximately" in text
    httpx2.post(f"{address}/admin/disable")
    assert "The cache is disabled: all requests are computed." in shown(address)


def test_it_shows_the_running_bound_and_troubles(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = AuditStats("drifted", n_requests=900, n_recomputed=40, n_changed=1, rate=0.002, lower=0.0004, upper=0.0123)
    health = Health(True, 0.25, 0.0, {"search: OSError": 3})
    stats = Stats(n_requests=1000, hits={"semantic": 400, "<mine>": 100}, audit=audit, health=health, errors=3)
    monkeypatch.setattr(server.cache, "stats", lambda: stats)
    server.history.add(Stats())
    server.history.add(stats)
    with listening(make_app(server, every_s=60)) as address:
        wait_for(lambda: len(server.history.samples()) == 3)
        html = httpx2.get(f"{address}/").text
    page = Texts(html)
    text = " ".join(page.texts)
    assert "≤ 1.2 % drifted; allowed 0.50 %" in text and "0.20 %; between 0.04 % and 1.2 %" in text
    assert "The cache is failing: 25% of calls" in text and "search: OSError (3)" in text
    assert "Nothing is reused approximately: drifted." in text
    assert "<mine>" not in html and "<mine>: 10.0 % since the start" in text
    (band,) = [attributes for tag, attributes in page.tags if tag == "polygon"]
    assert band["points"] == "0,0.2000 1,0.2000 1,0.9740 0,0.9740"
    (allowed,) = [attributes for tag, attributes in page.tags if tag == "line"]
    assert allowed["y1"] == allowed["y2"] == "0.6748"


def test_it_shows_prefixes_and_what_is_not_worthwhile(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    times = dict.fromkeys(("lookup_ms", "storing_ms", "layer_ms", "plain_ms", "beside_ms", "miss_ms", "hit_ms"))
    rates = dict.fromkeys(("hit_rate", "repeats", "worthwhile_from"))
    cost = [Cost(tokens, **times, **rates, is_bypassed=tokens < 64, saved_ms=1500.0) for tokens in (16, 32, 64)]
    stats = Stats(prefix_nbytes=2**29, cost=tuple(cost), bypassed={"not_worthwhile": 12})
    monkeypatch.setattr(server.cache, "stats", lambda: stats)
    server.phase = "draining"
    with listening(make_app(server)) as address:
        text = shown(address)
    assert "blocks of prefixes 536.9 MB 1.1 GB 50.0 %" in text and "Time saved 4.5 s" in text
    assert "The server is draining." in text and "not_worthwhile 12" in text
    assert "Not worthwhile, and bypassed, for calls from these lengths on, in tokens: 16, 32." in text


def test_everything_is_escaped() -> None:
    with serving(model='<script>alert("x")</script>') as server, listening(make_app(server)) as address:
        html = httpx2.get(f"{address}/").text
    page = Texts(html)
    assert '<script>alert("x")</script>' in page.texts and html.count("<script") == 1


def test_nothing_is_loaded_from_elsewhere_and_every_script_is_the_own(address: str) -> None:
    first, second = httpx2.get(f"{address}/"), httpx2.get(f"{address}/")
    policies = [answer.headers["content-security-policy"] for answer in (first, second)]
    nonces = [re.findall(r"'nonce-([^']+)'", policy) for policy in policies]
    assert len({*nonces[0], *nonces[1]}) == 2 and "default-src 'none'" in policies[0]
    assert "unsafe" not in policies[0] and "frame-ancestors 'none'" in policies[0]
    for tag, attributes in Texts(first.text).tags:
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes), tag
        assert not attributes.keys() & {"src", "action"} and attributes.get("href", "data:,") == "data:,"
        if tag in ("script", "style"):
            assert attributes["nonce"] == nonces[0][0]
    part = httpx2.get(f"{address}/admin/figures")
    assert "nonce" not in part.headers["content-security-policy"] and "<script" not in part.text
    assert first.headers["cache-control"] == part.headers["cache-control"] == "no-store"


def test_history_is_bounded_and_tells_shares_of_each_interval() -> None:
    clock = Ticking()
    history = History(clock)
    assert history.samples() == [] and history.intervals() == []
    for n in range(2000):
        clock.now = 5.0 * n
        history.add(Stats(n_requests=10 * n, hits={"exact": 4 * n, "semantic": 2 * n}))
    samples, intervals = history.samples(), history.intervals()
    assert samples[-1].at_s == 9995.0 and samples[0].at_s >= 9995.0 - 3600 and len(samples) <= 121
    assert intervals[-1] == Interval(30.0, 60, {"exact": 0.4, "semantic": 0.2})
    assert {one.seconds for one in intervals} == {30.0}
    clock.now += 5
    history.add(Stats(n_requests=19_990, hits={"exact": 7996, "semantic": 3998}))
    assert History(clock).intervals() == [] and history.intervals()[-1].n_requests < 60


def test_shares_are_of_rungs_that_served_in_the_interval() -> None:
    history = History(Ticking())
    for hits in ({"exact": 3, "semantic": 2}, {"exact": 4, "semantic": 2, "prefix": 0}, {"exact": 4, "semantic": 2}):
        history.add(Stats(n_requests=6 + hits["exact"], hits=hits))
    assert history.intervals() == [Interval(0.0, 1, {"exact": 1.0}), Interval(0.0, 0, {})]


def test_samples_are_taken_while_the_server_runs(server: Server, address: str) -> None:
    wait_for(lambda: len(server.history.samples()) > 2)


def test_a_sample_that_fails_ends_nothing_and_is_told_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    n_read = iter(range(1000))

    def read() -> Stats:
        if next(n_read) < 3:
            raise OSError("not now")
        return Stats()

    async def keep() -> None:
        async with server.history.kept(read, 0.01):
            while not server.history.samples():
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(keep(), 30))
    assert caplog.messages.count("no sample was taken") == 1


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (count(12345), "12,345"),
        (percent(0.0), "0 %"),
        (percent(0.00456), "0.46 %"),
        (percent(0.634), "63.4 %"),
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(2**30), "1.1 GB"),
        (size(None), "-"),
        (duration(None), "-"),
        (duration(0.00123), "1.23 ms"),
        (duration(0.9996), "1 s"),
        (duration(90), "2 min"),
        (duration(7200), "2.0 h"),
    ],
)
def test_figures_are_written_with_their_unit(made: str, wanted: str) -> None:
    assert made == wanted.replace(" ", "\N{NO-BREAK SPACE}")


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("size_name", SIZES)
def test_in_a_browser_nothing_overflows_and_nothing_is_complained_of(
    size_name: str, browser: Any, server: Server, address: str
) -> None:
    for ids in (IDS, IDS, [*IDS, 5]):
        httpx2.post(f"{address}/predict", json=ids)
    wait_for(lambda: bool(server.history.intervals()))
    browser.show(address, size_name)
    assert browser.run("return document.title") == "tiny · llmcache"
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.run("return window.innerWidth") == SIZES[size_name][0]
    buttons = "return [...document.querySelectorAll('button:not([hidden])')]"
    small = f"{buttons}.filter(b => b.offsetParent && b.offsetHeight < 44).length"
    assert browser.run(small) == 0
    assert browser.complaints() == []


@pytest.mark.slow
def test_buttons_ask_act_and_tell(browser: Any, server: Server, address: str) -> None:
    httpx2.post(f"{address}/predict", json=IDS)
    browser.show(address, "desk")
    browser.press("purge", "cancel")
    assert server.cache.stats().n_stored == 1
    browser.press("purge", "go", namespace="<b>another</b>")
    wait_for(lambda: browser.told() == "Purged 0 requests of namespace <b>another</b>.")
    browser.press("purge", "go", namespace="default")
    wait_for(lambda: browser.told() == "Purged 1 requests of namespace default.")
    assert server.cache.stats().n_stored == 0
    browser.press("disable", "go")
    wait_for(lambda: browser.told() == "The cache is disabled." and server.is_disabled)
    wait_for(lambda: browser.shows("enable") and not browser.shows("disable"))
    assert "all requests are computed" in browser.text("figures")
    browser.press("enable", "go")
    wait_for(lambda: browser.told() == "The cache is enabled." and not server.is_disabled)
    browser.press("audit", "go")
    wait_for(lambda: browser.told() == "Done: 0 jobs of the audit.")
    browser.press("drain", "go")
    wait_for(lambda: browser.told() == "The server is draining; 0 requests are under way.")
    wait_for(lambda: browser.shows("resume") and not browser.shows("drain"))
    assert "The server is draining." in browser.text("figures")
    browser.press("resume", "go")
    wait_for(lambda: browser.told() == "The server is ready." and browser.shows("drain"))
    browser.press("save", "go")
    wait_for(lambda: browser.told() == "Saved.")
    assert browser.complaints() == []


@pytest.mark.slow
def test_a_browser_signs_in_with_a_key_as_its_password(browser: Any, models: Path, tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.yaml", "boss", "public", ("infer", "admin"))
    server = make_server(models / "classifier", keys=tmp_path / "keys.yaml", warmup_tokens=0)
    with listening(create_app(server)) as address:
        browser.show(address.replace("//", f"//boss:{key}@"), "desk")
        assert "Health" in browser.text("figures")
        browser.press("disable", "go")
        wait_for(lambda: browser.told() == "The cache is disabled." and server.is_disabled)
        wait_for(lambda: browser.shows("enable"))
        assert browser.complaints() == [] and "/admin/disable" in browser.text("figures")
        assert httpx2.get(f"{address}/").status_code == 401


@pytest.mark.slow
def test_colours_have_contrast_in_light_and_dark(browser: Any, address: str) -> None:
    browser.show(address, "phone")
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        assert browser.least_contrast() >= 4.5, scheme
