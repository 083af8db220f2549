"""OpenAI's `/v1/models` and `/v1/embeddings`, and vLLM's additions: classify, score, and rerank as by Jina and Cohere.

`/embeddings`, `/models` and `/rerank` are for clients of Infinity, which has no `/v1`; `/rerank` is also TEI's route.
"""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import time
from typing import Annotated, Any, Final, Literal
from uuid import uuid4

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from numpy.typing import NDArray
from pydantic import AliasChoices, BaseModel, Field, RootModel, SkipValidation, StrictInt, StrictStr

from llmcache.serving import tei
from llmcache.serving.bodies import BodyRoute, rendered
from llmcache.serving.encoder import Output
from llmcache.serving.fields import Fields
from llmcache.serving.loading import Kind
from llmcache.serving.refusals import Refusal
from llmcache.serving.server import Server
from llmcache.serving.tokenizing import Item

router = APIRouter(tags=["openai"], route_class=BodyRoute)

_CUT: Final = "set `truncate_prompt_tokens` to -1"
_IDS: Final = (
    "`input`: give texts (LangChain's OpenAIEmbeddings does with check_embedding_ctx_length=False): ids of OpenAI's "
    "tokenizer are other words here; a server with --allow-token-ids takes those of its own tokenizer"
)


class _Body(BaseModel):
    """Fields shared by the routes. Unknown fields are ignored: clients send what other servers accept."""

    model: StrictStr | None = None
    #: Maximum tokens to which inputs are cut, as in vLLM; only -1, the model's own maximum, is supported.
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1)] | None = None


class EmbeddingsRequest(_Body):
    """Body of `/v1/embeddings`."""

    input: tei.Input
    encoding_format: Literal["float", "base64"] | None = None  # LiteLLM sends null
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    user: StrictStr | None = None


class ClassifyRequest(_Body):
    """Body of `/v1/classify`."""

    input: StrictStr | tei.Texts


class _PairsRequest(_Body):
    use_activation: bool | None = None  # vLLM's; False: logits in place of their sigmoid


class ScoreRequest(_PairsRequest):
    """Body of `/v1/score`, by any of vLLM's names of its fields."""

    text_1: StrictStr | tei.Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: StrictStr | tei.Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))


class RerankDocument(BaseModel):
    """A document given as an object."""

    text: StrictStr


class RerankRequest(_PairsRequest):
    """Body of `/v1/rerank`."""

    query: StrictStr
    documents: Annotated[list[StrictStr | RerankDocument], Field(fail_fast=True)]
    top_n: Annotated[StrictInt, Field(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: StrictInt | None = None


class AnyRerankRequest(RootModel[Any]):
    """Body of `/rerank`: `texts` as in TEI, or `documents` as in Infinity, whose documents are returned as strings."""

    root: SkipValidation[tei.RerankRequest | RerankRequest]  # `rerank_as_asked` checks it


@router.get("/models", include_in_schema=False)
@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """List the served model under each of its names."""
    server: Server = request.app.state.server
    return JSONResponse({"object": "list", "data": [_model_object(server, name) for name in server.names]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> JSONResponse:
    """Return the model with this name."""
    server: Server = request.app.state.server
    server.check_name(name)
    return JSONResponse(_model_object(server, name))


@router.post("/embeddings", include_in_schema=False)
@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
    """Return embeddings of norm 1 in OpenAI's format."""
    items, is_list = tei.items_of(body.input)
    if any(isinstance(item, list) for item in items) and not request.app.state.server.settings.allow_token_ids:
        raise Refusal("invalid", _IDS, param="input")
    server, made = await _run_model(body, request, "embedding", items, Fields("input", is_list, cut=_CUT))

    def shown(values: NDArray[np.float32]) -> Any:
        row = tei.embedding(server, values, True, body.dimensions)
        is_packed = body.encoding_format == "base64"
        return base64.b64encode(row.astype("<f4").tobytes()).decode() if is_packed else row.tolist()

    data = ({"object": "embedding", "index": i, "embedding": shown(one.values)} for i, one in enumerate(made))
    return await _list(server, made, data)


@router.post("/v1/classify")
async def classify(body: ClassifyRequest, request: Request) -> Response:
    """Return the likeliest label of each input, and the probabilities of all labels."""
    items, is_list = tei.items_of(body.input)
    server, made = await _run_model(body, request, "classifier", items, Fields("input", is_list, cut=_CUT))
    shares, labels = (tei.probabilities(server, one.values) for one in made), server.served.labels
    data = (
        {"index": i, "label": labels[int(np.argmax(row))], "probs": row.tolist(), "num_classes": len(row)}
        for i, row in enumerate(shares)
    )
    return await _list(server, made, data, "classify")


@router.post("/score", include_in_schema=False)
@router.post("/v1/score")
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score one text with each of the others, or two lists pair by pair, in the format of vLLM."""
    ones, others = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    ones = ones * len(others) if len(ones) == 1 else ones
    if len(ones) != len(others):
        raise Refusal("invalid", "`text_1`: give one text, or as many as in `text_2`", param="text_1")
    fields = Fields("text_2", not isinstance(body.text_2, str), beside="text_1", cut=_CUT)
    server, made = await _run_model(body, request, "reranker", list(zip(ones, others, strict=True)), fields)
    scores = tei.scores_of(made, body.use_activation is False)
    data = ({"index": i, "object": "score", "score": one} for i, one in enumerate(scores))
    return await _list(server, made, data, "score")


@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(body: RerankRequest, request: Request) -> JSONResponse:
    """Score documents by relevance to a query, best first, in the format of Jina and Cohere."""
    return await _reranked(body, request, body.return_documents is not False, lambda text: {"text": text})


async def _reranked(
    body: RerankRequest, request: Request, shows_documents: bool, shown: Callable[[str], Any]
) -> JSONResponse:
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    fields = Fields("documents", True, beside="query", cut=_CUT)
    server, made = await _run_model(body, request, "reranker", [(body.query, text) for text in texts], fields)
    scores = tei.scores_of(made, body.use_activation is False)
    results = [
        {"index": i} | ({"document": shown(texts[i])} if shows_documents else {}) | {"relevance_score": scores[i]}
        for i in tei.ranking(scores)[: body.top_n or None]
    ]
    answer = {"id": f"rerank-{uuid4().hex}", "model": server.name, "usage": _usage(made), "results": results}
    return JSONResponse(answer, headers=tei.headers(server, made))


@router.post("/rerank")
async def rerank_as_asked(body: AnyRerankRequest, request: Request) -> JSONResponse:
    """Score texts by relevance to a query, best first, in the format of TEI or of Infinity, as the request has it."""
    given: Any = body.root
    if not isinstance(given, Mapping) or "documents" not in given:
        return await tei.rerank(tei.validated(tei.RerankRequest, given), request)
    if "texts" in given:
        raise Refusal("invalid", "body: give `texts` (as TEI) or `documents` (as Infinity), not both")
    asked = tei.validated(RerankRequest, given)
    return await _reranked(asked, request, bool(asked.return_documents), str)


async def _run_model(
    body: _Body, request: Request, kind: Kind, items: Sequence[Item], fields: Fields
) -> tuple[Server, list[Output]]:
    """Check model name and truncation, and return the server and the model's outputs; see `computed`."""
    request.app.state.server.check_name(body.model)
    if (body.truncate_prompt_tokens or -1) > 0:
        raise Refusal("invalid", "inputs are cut at the model's own length: give -1", param="truncate_prompt_tokens")
    cut = tei.Cut(truncate=None if body.truncate_prompt_tokens is None else True)
    return await tei.computed(request, kind, items, cut, fields)


def _model_object(server: Server, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.started_at,
        "owned_by": "llmcache",
        "root": server.name,
        "parent": None,
        "max_model_len": server.served.max_length,
    }


async def _list(
    server: Server, made: list[Output], data: Iterable[dict[str, Any]], prefix: str | None = None
) -> Response:
    """Return OpenAI's list object of `data`; with the `prefix` of an id, as vLLM's routes have it."""
    named = {} if prefix is None else {"id": f"{prefix}-{uuid4().hex}", "created": int(time())}
    more = {"object": "list", "model": server.name, "usage": _usage(made), **named}
    return await rendered(data, tei.numbers_in(made), tei.headers(server, made), **more)


def _usage(made: list[Output]) -> dict[str, int]:
    n_tokens = sum(one.n_tokens for one in made)
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
