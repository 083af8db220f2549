"""Routes of text-embeddings-inference (TEI), with its fields, truncation and errors (OpenAPI document, version 1.9).

Unknown fields are ignored, as in TEI. A route that needs another kind of model answers with an error that names it.
One thing differs: `/predict` refuses a flat list of several texts: TEI takes two for a pair, many users for a batch.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    RootModel,
    SkipValidation,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)
from scipy.special import expit, softmax

from llmcache import __version__
from llmcache.serving.bodies import BodyRoute, cache_headers, invalid, rendered
from llmcache.serving.encoder import Encoder, Output
from llmcache.serving.fields import Fields
from llmcache.serving.front import unless_gone
from llmcache.serving.loading import Kind
from llmcache.serving.refusals import Refusal
from llmcache.serving.server import Server
from llmcache.serving.tokenizing import Item, Prompted, Tokens, n_characters

_M = TypeVar("_M", bound=BaseModel)

router = APIRouter(tags=["text-embeddings-inference"], route_class=BodyRoute)

_FAST = Field(fail_fast=True)  # report only the first wrong item, however many there are
Texts = Annotated[list[StrictStr], _FAST]
_Ids = Annotated[list[StrictInt], Field(min_length=1, fail_fast=True)]
#: Input of the embedding routes: a text, token ids, or a list of either.
Input = StrictStr | Texts | Annotated[list[_Ids], _FAST] | Annotated[list[StrictInt], _FAST]
_Pair = Annotated[list[StrictStr], Field(min_length=1, max_length=2, fail_fast=True)]
#: Input of `/predict`: a text, or a list of lists that hold one text or a pair each.
Classified = StrictStr | Annotated[list[_Pair], _FAST] | Texts
_AMBIGUOUS: Final = (
    '`inputs`: a flat list may be a pair or a batch: [["a", "b"]] is a pair, [["a"], ["b"]] are two texts'
)
#: A query or prompt is read with each text: it may repeat until a request has as many characters as this many bodies.
_N_REPEATS: Final = 4
_Direction = Annotated[
    Literal["left", "right"], BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
]


class Cut(BaseModel):
    """Whether inputs that are too long are cut, and at which end."""

    truncate: StrictBool | None = None
    truncation_direction: _Direction = "right"


class EmbedAllRequest(Cut):
    """Body of `/embed_all`."""

    inputs: Input
    prompt_name: StrictStr | None = None


class EmbedRequest(EmbedAllRequest):
    """Body of `/embed`."""

    normalize: StrictBool = True
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None


class HubParameters(BaseModel):
    """Field `parameters` of a text classification, as `huggingface_hub.InferenceClient` sends it."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: Annotated[StrictInt, Field(ge=1)] | None = None


class PredictRequest(Cut):
    """Body of `/predict`. With `parameters`, one text is answered with a list of one list, as on the hub."""

    inputs: Classified
    raw_scores: StrictBool = False
    parameters: HubParameters | None = None


class RerankRequest(Cut):
    """Body of `/rerank`."""

    query: StrictStr
    texts: Texts
    raw_scores: StrictBool = False
    return_text: StrictBool = False


class SimilarityParameters(Cut):
    """Field `parameters` of `/similarity`."""

    prompt_name: StrictStr | None = None


class SimilarityInputs(BaseModel):
    """Field `inputs` of `/similarity`."""

    source_sentence: StrictStr
    sentences: Texts


class SimilarityRequest(BaseModel):
    """Body of `/similarity`."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class AnyRequest(RootModel[Any]):
    """Body of `/`: that of `/embed`, `/similarity`, `/predict` or `/rerank`, whichever the served model takes."""

    # The served model decides which: `main_route` checks it.
    root: SkipValidation[EmbedRequest | SimilarityRequest | PredictRequest | RerankRequest]


class TokenizeRequest(BaseModel):
    """Body of `/tokenize`."""

    inputs: StrictStr | Texts
    add_special_tokens: StrictBool = True
    prompt_name: StrictStr | None = None


class DecodeRequest(BaseModel):
    """Body of `/decode`."""

    ids: Annotated[list[StrictInt], _FAST] | Annotated[list[Annotated[list[StrictInt], _FAST]], _FAST]
    skip_special_tokens: StrictBool = True


@router.post("/embed")
async def embed(body: EmbedRequest, request: Request) -> Response:
    """Return embeddings, one list of floats for each input."""
    items, is_list = items_of(body.inputs)
    server, made = await computed(request, "embedding", items, body, Fields("inputs", is_list), body.prompt_name)
    rows = (embedding(server, one.values, body.normalize, body.dimensions).tolist() for one in made)
    return await rendered(rows, numbers_in(made), headers(server, made))


@router.post("/embed_all")
async def embed_all(body: EmbedAllRequest, request: Request) -> Response:
    """Return the last hidden states of all tokens. Always computed: entries store one vector per input."""
    server: Server = request.app.state.server
    server.needs("embedding")
    items, is_list = items_of(body.inputs)
    encoder, tokens = await tokenised(server, items, body, Fields("inputs", is_list), body.prompt_name)
    most = server.settings.max_batch_tokens
    if len(tokens) > 1 and sum(map(len, tokens)) > most:  # each token has a vector in the response
        raise Refusal("too_large", f"the inputs have more than {most} tokens (--max-batch-tokens): send fewer")
    states = await encoder.states(tokens)
    return await rendered(states, sum(len(rows) * len(rows[0]) for rows in states))


@router.post("/predict")
async def predict(body: PredictRequest, request: Request) -> Response:
    """Return all labels with scores, best first, for each input."""
    items, is_batch = classified_of(body.inputs)
    asked, server = body.parameters or HubParameters(), request.app.state.server
    server.needs("classifier")
    function = "sigmoid" if server.served.is_multi_label else "softmax"
    if asked.function_to_apply not in (None, "none", function):
        raise Refusal("invalid", f"`parameters.function_to_apply`: this model has {function}; `none` gives raw scores")
    _, made = await computed(request, "classifier", items, body, Fields("inputs", is_batch))
    is_raw = body.raw_scores or asked.function_to_apply == "none"
    found = (_ranked(server, one.values, is_raw)[: asked.top_k] for one in made)
    has_list = is_batch or body.parameters is not None
    return await rendered(found if has_list else next(found), numbers_in(made), headers(server, made))


async def rerank(body: RerankRequest, request: Request) -> JSONResponse:
    """Score texts by relevance to a query, best first."""
    items = [(body.query, text) for text in body.texts]
    server, made = await computed(request, "reranker", items, body, Fields("texts", True, beside="query"))
    scores = scores_of(made, body.raw_scores)
    ranks = [
        {"index": i, "score": scores[i]} | ({"text": body.texts[i]} if body.return_text else {})
        for i in ranking(scores)
    ]
    return JSONResponse(ranks, headers=headers(server, made))


@router.post("/similarity")
async def similarity(body: SimilarityRequest, request: Request) -> JSONResponse:
    """Return the cosine similarity of the source sentence to each of the other sentences."""
    asked = body.parameters or SimilarityParameters()
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    if len(texts) == 1:
        raise Refusal("empty", "`inputs.sentences` cannot be empty")
    fields = Fields("inputs.sentences", True, first="inputs.source_sentence", cut="set `parameters.truncate`")
    server, made = await computed(request, "embedding", texts, asked, fields, asked.prompt_name)
    source, *others = (embedding(server, one.values, True, None) for one in made)
    return JSONResponse([float(source @ one) for one in others], headers=headers(server, made))


@router.post("/")
@router.post("/invocations")
async def main_route(body: AnyRequest, request: Request) -> Response:
    """Answer as the main route of the served model does: `/embed` or `/similarity`, `/predict`, or `/rerank`."""
    server: Server = request.app.state.server
    given = body.root
    match server.served.kind:
        case "embedding" if isinstance(given, Mapping) and isinstance(given.get("inputs"), Mapping):
            return await similarity(validated(SimilarityRequest, given), request)
        case "embedding":
            return await embed(validated(EmbedRequest, given), request)
        case "classifier":
            return await predict(validated(PredictRequest, given), request)
        case "reranker":
            return await rerank(validated(RerankRequest, given), request)
    raise Refusal("wrong_model", "this route is not of a causal language model: use /v1/chat/completions")


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the tokens of each text, with their positions in characters."""
    server: Server = request.app.state.server
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    check_number(server, len(texts))
    prompt = prompt_of(server, body.prompt_name)
    fields, pieces_of = Fields("inputs", texts is body.inputs), server.tokenizing.pieces
    pieces = await asyncio.to_thread(fields.each, lambda text: pieces_of(prompt + text, body.add_special_tokens), texts)
    return await rendered(pieces, sum(map(len, texts)))  # estimate: one number per character


@router.post("/decode")
async def decode(body: DecodeRequest, request: Request) -> JSONResponse:
    """Return the text for each list of token ids."""
    server: Server = request.app.state.server
    is_list = bool(body.ids) and isinstance(body.ids[0], list)
    rows = body.ids if is_list else [body.ids]
    check_number(server, len(rows), "ids")
    fields, text_of = Fields("ids", is_list), server.tokenizing.decode
    return JSONResponse(await asyncio.to_thread(fields.each, lambda row: text_of(row, body.skip_special_tokens), rows))


@router.get("/info")
async def info(request: Request) -> JSONResponse:
    """Return the served model and the server's limits."""
    server: Server = request.app.state.server
    served, settings = server.served, server.settings
    about: dict[str, Any] = {"pooling": server.cache.payload} if served.kind == "embedding" else {}
    if served.labels:
        numbered = list(enumerate(served.labels))
        about = {"id2label": {str(i): label for i, label in numbered}, "label2id": {label: i for i, label in numbered}}
    return JSONResponse(
        {
            "model_id": server.name,
            "model_sha": getattr(served.config, "_commit_hash", None),
            "served_model_name": server.name,
            "model_dtype": server.dtype,
            "model_device": str(server.device),
            "engine": await asyncio.to_thread(server.engine_name),
            "draft": server.draft_name,
            "model_type": {served.kind: about},
            "max_concurrent_requests": settings.max_concurrent_requests,
            "max_input_length": served.max_length,
            "max_batch_tokens": settings.max_batch_tokens,
            "max_batch_requests": settings.max_batch_requests,
            "max_client_batch_size": server.max_inputs,
            "auto_truncate": settings.auto_truncate,
            "tokenization_workers": 1,
            "version": __version__,
        }
    )


# -- shared with the other dialect -------------------------------------------------------------------------------------


async def computed(
    request: Request, kind: Kind, items: Sequence[Item], cut: Cut, fields: Fields, prompt_name: str | None = None
) -> tuple[Server, list[Output]]:
    """Return the server and the model's output for each item; `Refusal` for another `kind` of model or a bad input."""
    server: Server = request.app.state.server
    server.needs(kind)
    encoder, items, is_cut = _prepared(server, items, cut, fields, prompt_name)
    most = _N_REPEATS * server.settings.payload_limit
    if n_characters(items) > most:
        text = f"the texts with their query or prompt have more than {most:,} characters: send fewer per request"
        raise Refusal("too_large", text, param=fields.name)
    work = encoder.run(items, request.state.tenant.namespace, is_cut, cut.truncation_direction)
    return server, fields.all(await unless_gone(request, work))


async def tokenised(
    server: Server, items: Sequence[Item], cut: Cut, fields: Fields, prompt_name: str | None
) -> tuple[Encoder, list[Tokens]]:
    """Return the encoder and the tokens of each item; errors are those of `computed`."""
    encoder, items, is_cut = _prepared(server, items, cut, fields, prompt_name)
    return encoder, fields.all(await encoder.tokens(items, is_cut, cut.truncation_direction))


def _prepared(
    server: Server, items: Sequence[Item], cut: Cut, fields: Fields, prompt_name: str | None
) -> tuple[Encoder, list[Item], bool]:
    """Return the encoder, the items with their prompt, and whether those that are too long are cut."""
    assert server.encoder is not None
    check_number(server, len(items), fields.name)
    items = _with_prompt(server, items, prompt_name)
    return server.encoder, items, server.settings.auto_truncate if cut.truncate is None else cut.truncate


def headers(server: Server, outputs: Sequence[Output]) -> dict[str, str]:
    """Return headers with hits, tokens and times in ms if the setting `reveal_hits` is on."""
    if not server.settings.reveal_hits:
        return {}
    return {
        **cache_headers([one.rung for one in outputs]),
        "X-Cache-Hits": str(sum(one.rung is not None for one in outputs)),
        "X-Compute-Tokens": str(sum(one.n_tokens for one in outputs)),
        "X-Queue-Time": f"{1e3 * max(one.queue_s for one in outputs):.3f}",
        "X-Inference-Time": f"{1e3 * max(one.compute_s for one in outputs):.3f}",
    }


def check_number(server: Server, n: int, field: str = "inputs") -> None:
    """Raise `Refusal` if there are no inputs or more than `max_inputs`."""
    most = server.max_inputs
    if n == 0:
        raise Refusal("empty", f"`{field}` cannot be empty", param=field)
    if n > most:
        raise Refusal("too_large", f"batch size {n} > maximum allowed batch size {most} (--max-client-batch-size)")


def validated(model: type[_M], given: Any) -> _M:
    """Return a body of this model. Raises FastAPI's error for one that the model refuses."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise invalid(error) from None


def items_of(inputs: Any) -> tuple[list[Any], bool]:
    """Return the inputs, and whether they are a list: not a single text, or the token ids of one."""
    is_one = isinstance(inputs, str) or bool(inputs and isinstance(inputs[0], int))
    return [inputs] if is_one else list(inputs), not is_one


def classified_of(inputs: Any) -> tuple[list[Item], bool]:
    """Return the items to classify, and whether the response is a list with one answer per item."""
    if isinstance(inputs, str):
        return [inputs], False
    if inputs and isinstance(inputs[0], list):
        return [one[0] if len(one) == 1 else tuple(one) for one in inputs], True
    if len(inputs) > 1:
        raise Refusal("invalid", _AMBIGUOUS, param="inputs")
    return list(inputs), False


def _with_prompt(server: Server, items: Sequence[Item], name: str | None) -> list[Item]:
    """Return the items with the prompt `name` prepended; None: the default prompt, if any, for texts and pairs only."""
    prompt = prompt_of(server, name)
    if name is not None and any(isinstance(item, list) for item in items):
        raise Refusal("invalid", "`prompt_name` needs texts: token ids are taken as they are")
    if not prompt:
        return list(items)
    texts = [(item,) if isinstance(item, str) else item for item in items]
    return [Prompted(prompt, one) if isinstance(one, tuple) else one for one in texts]


def prompt_of(server: Server, name: str | None) -> str:
    """Return the model's prompt with this name; None: its default prompt, or "" without one."""
    prompts, name = server.served.prompts, server.served.default_prompt if name is None else name
    if name is None:
        return ""
    if name not in prompts:
        raise Refusal("invalid", f"`prompt_name`: the model has no such prompt; it has: {', '.join(prompts) or 'none'}")
    return prompts[name]


def embedding(
    server: Server, values: NDArray[np.float32], normalize: bool, dimensions: int | None
) -> NDArray[np.float32]:
    """Return the first `dimensions` of a vector (None: the model's default), scaled to norm 1 if `normalize`."""
    if dimensions is not None and dimensions > len(values):
        raise Refusal("invalid", f"`dimensions`: the model has {len(values)}", param="dimensions")
    vector = values[: dimensions or server.served.dimensions]
    return vector / max(float(np.linalg.norm(vector)), 1e-12) if normalize else vector


def probabilities(server: Server, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the probability of each label: sigmoid for multi-label models, else softmax."""
    made: NDArray[np.float64] = (expit if server.served.is_multi_label else softmax)(logits.astype(np.float64))
    return made


def numbers_in(outputs: Sequence[Output]) -> int:
    return sum(len(one.values) for one in outputs)


def scores_of(outputs: Sequence[Output], is_raw: bool) -> list[float]:
    """Return a reranker's score of each input: its logit if `is_raw`, else the sigmoid of it."""
    logits = np.array([one.values[0] for one in outputs], np.float64)
    scores: list[float] = (logits if is_raw else expit(logits)).tolist()
    return scores


def ranking(scores: Sequence[float]) -> list[int]:
    """Return indices by score, highest first."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])


def _ranked(server: Server, logits: NDArray[np.float32], raw: bool) -> list[dict[str, Any]]:
    scores = (logits.astype(np.float64) if raw else probabilities(server, logits)).tolist()
    return [{"score": scores[i], "label": server.served.labels[i]} for i in ranking(scores)]
