"""The clients of OpenAI, Hugging Face and Cohere ask a server as they ask their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures import Patch
from tests.redis_server import wait_until
from tests.serving.served import CONTEXT, LABELS, byte_tokenizer, decoder, figure, listening, make_server

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "where is my card"}]


def test_openai_embeddings(models: Path) -> None:
    openai = pytest.importorskip("openai")
    with (
        listening(make_server(models / "embedding")) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client,
    ):
        made = client.embeddings.create(model="embedding", input=["lost my card", "cash"])  # base64 by default
        assert len(made.data) == 2
        assert np.linalg.norm(made.data[0].embedding) == pytest.approx(1, abs=1e-5)
        assert [one.id for one in client.models.list()] == ["embedding"]
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="a")
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
            client.embeddings.create(model="embedding", input=[[15, 16], [17]])


def test_openai_chats(models: Path) -> None:
    openai = pytest.importorskip("openai")
    server = make_server(models / "decoder", {"prefix": {"block": 8}}, reveal_hits=True)
    asked = {"model": "decoder", "messages": CHAT, "temperature": 0, "max_tokens": 12}
    with listening(server) as (_, url), openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        whole = client.chat.completions.create(**asked)
        expected = whole.choices[0].message.content
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == expected
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens
        with client.chat.completions.stream(**asked) as events:
            assert "".join(event.delta for event in events if event.type == "content.delta") == expected
        with pytest.raises(openai.BadRequestError, match="context"):
            client.completions.create(model="decoder", prompt="card " * CONTEXT)
        long = client.completions.create(model="decoder", prompt="the", max_tokens=200, stream=True)
        next(long)
        long.close()
        wait_until(lambda: figure(server, "num_requests_running") == 0)


@pytest.mark.parametrize("settings", [{"batch_size": 3}, {"num_concurrent": 2}], ids=["batches", "concurrent"])
def test_lm_eval(models: Path, settings: dict[str, int]) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    contexts = ["the card was lost, and the cash is there", "where is my card? it costs 5 €"]
    pairs = [(one, end) for one in contexts for end in (" more", " and a naïve more", "\n the card")]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    folder, server = str(models / "decoder"), make_server(models / "decoder", {"prefix": {"block": 8}})
    known = {"tokenizer": folder, "tokenizer_backend": "huggingface"}
    with listening(server) as (_, url):
        client = LocalCompletionsAPI(f"{url}/v1/completions", model="decoder", **known, **settings)
        for _ in range(2):  # the second time from the cache
            found = client.loglikelihood(asked)
    plain = HFLM(decoder(), tokenizer=byte_tokenizer()).loglikelihood(asked)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in plain], abs=1e-4)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in plain]
    assert figure(server, "prefix_cache_hits_total") > figure(server, "prefix_cache_queries_total") / 2


def test_hugging_face(models: Path, monkeypatch: Patch) -> None:
    from huggingface_hub import InferenceClient, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # it blocks local servers too
    with listening(make_server(models / "embedding")) as (_, url):
        client = InferenceClient(base_url=url)
        made = client.feature_extraction("lost my card")
        assert np.linalg.norm(made) == pytest.approx(1, abs=1e-5)
        assert InferenceClient(base_url=f"{url}/embed").feature_extraction("lost my card").tolist() == made.tolist()
        near, far = client.sentence_similarity("lost my card", other_sentences=["lost my card", "cash"])
        assert near == pytest.approx(1, abs=1e-5) and far < near
    with listening(make_server(models / "classifier")) as (_, url):
        best, second = InferenceClient(base_url=url).text_classification("lost my card", top_k=2)
        assert best.label in LABELS and best.score >= second.score


def test_cohere(models: Path) -> None:
    cohere, httpx = pytest.importorskip("cohere"), pytest.importorskip("httpx")
    with (
        listening(make_server(models / "reranker")) as (_, url),
        httpx.Client() as connections,
    ):  # Cohere's client never closes its own
        client: Any = cohere.ClientV2(api_key="-", base_url=url, httpx_client=connections)
        ranks = client.rerank(model="reranker", query="my card", documents=["cash", "lost my card"], top_n=1)
        assert len(ranks.results) == 1
        assert 0 <= ranks.results[0].relevance_score <= 1
