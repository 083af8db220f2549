"""The page at `/`: statistics and plots rendered on the server, and operator buttons. It loads no other files."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import llmcache
from llmcache.serving.history import EVERY_S, Interval, Sample
from llmcache.serving.server import Server
from llmcache.stats import Stats

#: Styles of rungs, stacked in this order from the bottom of a bar; rungs not listed share the last one.
_STYLES: Final = ("exact", "prefix", "semantic", "draft", "other")
_MAX_ROUTES = 8


def count(value: int) -> str:
    """Format a whole number as `12,345`."""
    return f"{value:,}"


def percent(share: float) -> str:
    """Format a share (0 to 1) as `12.3 %`, below 1 % with two decimals."""
    value = 100 * share
    return _with_unit(f"{value:.1f}" if value >= 1 else f"{value:.2f}" if value else "0", "%")


def size(nbytes: int | None) -> str:
    """Format a number of bytes in the largest unit in which it is at least 1; None as `-`."""
    if nbytes is None:
        return "-"
    value, units = float(nbytes), ["B", "kB", "MB", "GB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return _with_unit(f"{value:.0f}" if units[0] == "B" else f"{value:.1f}", units[0])


def duration(seconds: float | None) -> str:
    """Format seconds in ms, s, min or h; None as `-`."""
    if seconds is None:
        return "-"
    if abs(seconds) < 0.9995:
        return _with_unit(f"{1e3 * seconds:.3g}", "ms")
    if abs(seconds) < 60:
        return _with_unit(f"{seconds:.3g}", "s")
    return _with_unit(f"{seconds / 60:.0f}", "min") if abs(seconds) < 3600 else _with_unit(f"{seconds / 3600:.1f}", "h")


def _with_unit(value: str, unit: str) -> str:
    """Join value and unit by a no-break space."""
    return f"{value}\N{NO-BREAK SPACE}{unit}"


_templates: Final = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters |= {one.__name__: one for one in (count, percent, size, duration)}

router = APIRouter(include_in_schema=False)


@router.get("/", response_class=HTMLResponse)
async def page(request: Request) -> HTMLResponse:
    server: Server = request.app.state.server
    nonce = secrets.token_urlsafe(16)
    may_operate = request.state.tenant.may("admin")
    shown = {"nonce": nonce, "version": llmcache.__version__, "every_s": int(EVERY_S), "may_operate": may_operate}
    return _html(await asyncio.to_thread(_render, "page.html", server, shown), nonce)


@router.get("/admin/figures", response_class=HTMLResponse)
async def figures(request: Request) -> HTMLResponse:
    """Return the part of the page that is refreshed."""
    return _html(await asyncio.to_thread(_render, "figures.html", request.app.state.server, {}), None)


@router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """Return the routes and their bodies as plain HTML: a script would run where an operator is logged in."""
    template = _templates.get_template("docs.html")
    return _html(await asyncio.to_thread(lambda: template.render(request.app.openapi())), None)


def _html(text: str, nonce: str | None) -> HTMLResponse:
    own = "" if nonce is None else f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
    policy = f"default-src 'none'; {own}connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'"
    headers = {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
        "X-Frame-Options": "DENY",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "same-origin",
        "Cache-Control": "no-store",
    }
    return HTMLResponse(text, headers=headers)


def _render(template: str, server: Server, shown: Mapping[str, Any]) -> str:
    return _templates.get_template(template).render({**shown, **view(server)})


def view(server: Server) -> dict[str, Any]:
    """Return the variables of the templates. May block while `cache.stats()` waits for the cache."""
    stats, config = server.cache.stats(), server.cache.config
    calibration = server.cache.calibration
    allowed = config.max_drop if calibration is None else calibration.max_drop
    intervals = server.history.intervals()
    draft = "" if server.draft_name is None else f", draft: {server.draft_name}"
    return {
        "server": server,
        "computes": f"{server.engine_name()}, {server.dtype} on {server.device}{draft}",
        "stats": stats,
        "saved_s": stats.saved_s,
        "allowed": allowed,
        "intervals": intervals,
        "bars": list(_bars(intervals)),
        "rungs": [{"name": n, "style": _style(n), "share": k / stats.n_requests} for n, k in stats.hits.items()],
        "bound": _bound(server.history.samples(), allowed),
        "memory": list(_memory(stats, config.max_bytes)),
        "routes": server.metrics.slowest()[:_MAX_ROUTES],
        "troubles": list(_troubles(server, stats)),
        "by_operator": list(_by_operator(server)),
    }


def _bars(intervals: list[Interval]) -> Iterator[dict[str, Any]]:
    """Yield the rectangles of a plot of height 1 in which each bar has width 1."""
    for x, interval in enumerate(intervals):
        top = 1.0
        for rung, share in sorted(interval.shares.items(), key=lambda one: _STYLES.index(_style(one[0]))):
            top -= share
            yield {"x": x, "y": f"{top:.4f}", "height": f"{share:.4f}", "style": _style(rung)}


def _bound(samples: list[Sample], allowed: float) -> dict[str, Any] | None:
    """Return the plot of the audit's rate and bounds, one unit of width per sample; None below two samples."""
    known = [(one.at_s, one.audit) for one in samples if one.audit is not None]
    if len(known) < 2:
        return None
    audits = [audit for _, audit in known]
    top = max(2 * allowed, min(1.0, 1.25 * audits[-1].upper))

    def points(values: Sequence[float | None]) -> list[str]:
        return [f"{x},{1 - min(top, y) / top:.4f}" for x, y in enumerate(values) if y is not None]

    upper, lower = points([one.upper for one in audits]), points([one.lower for one in audits])
    return {
        "top": top,
        "width": len(known) - 1,
        "band": " ".join([*upper, *reversed(lower)]),
        "rate": " ".join(points([one.rate for one in audits])),
        "allowed": f"{1 - allowed / top:.4f}",
        "span_s": known[-1][0] - known[0][0],
    }


def _memory(stats: Stats, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the memory table: bytes held and budget of each part."""
    most = stats.max_nbytes_by_layer
    rows = [(f"bank of layer {layer}", nbytes, most[layer]) for layer, nbytes in stats.nbytes_by_layer.items()]
    if stats.prefix_max_nbytes:
        rows += [(f"{count(stats.n_blocks)} blocks of prefixes", stats.prefix_nbytes, stats.prefix_max_nbytes)]
    rows += [("all states", stats.nbytes + stats.prefix_nbytes, max_bytes)]
    for name, nbytes, budget in rows:
        yield {
            "name": name,
            "nbytes": nbytes,
            "max_bytes": budget,
            "share": round(min(1.0, nbytes / max(1, budget)), 4),
        }
    if stats.index_nbytes:
        yield {"name": "fingerprints", "nbytes": stats.index_nbytes, "max_bytes": None}


def _troubles(server: Server, stats: Stats) -> Iterator[str]:
    """Yield one sentence for each problem that the operator should know of."""
    if server.saves.is_kept:
        yield "Nothing is saved: the content of its folder is not used and is kept. The log says why."
    if server.saves.has_failed:
        yield "The latest save failed: the log says why."
    if stats.health.is_failing:
        yield f"The cache is {stats.health}."
    if stats.audit is not None and stats.audit.status in ("drifted", "failing", "off", "other weights"):
        yield f"Nothing is reused approximately: {stats.audit.status}."


def _by_operator(server: Server) -> Iterator[str]:
    """Yield one sentence for each state that an operator chose."""
    if server.phase != "ready":
        yield f"The server is {server.phase}."
    if server.is_disabled:
        yield "The cache is disabled: all requests are computed."


def _style(rung: str) -> str:
    return rung if rung in _STYLES else "other"
