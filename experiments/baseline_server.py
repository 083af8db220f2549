"""The server that people write themselves, which `llmcache serve` is compared with: FastAPI and plain transformers.

    python -m experiments.baseline_server FOLDER --port 8080

FOLDER holds a BERT with a linear head on the mean of its states, as sentence-transformers saves it. A request is a call
of the model. FastAPI runs the route in its pool of threads: texts are tokenised there at the same time, and a lock lets
one of them compute at a time, on all of torch's threads.
"""

import argparse
import threading

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoModel, AutoTokenizer


class Predict(BaseModel):
    inputs: str | list[str]


def create_app(folder: str) -> FastAPI:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, head = AutoModel.from_pretrained(folder).eval(), load_file(f"{folder}/2_Dense/model.safetensors")
    labels = [model.config.id2label[i] for i in range(model.config.num_labels)]
    app, lock = FastAPI(), threading.Lock()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/predict")
    def predict(request: Predict) -> JSONResponse:
        texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with lock, torch.inference_mode():
            states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
            pooled = (states * mask).sum(1) / mask.sum(1)
            scores = linear(pooled, head["linear.weight"], head["linear.bias"]).softmax(-1).tolist()
        named = [[{"label": label, "score": score} for label, score in zip(labels, row, strict=True)] for row in scores]
        best = [sorted(row, key=lambda one: -one["score"]) for row in named]
        return JSONResponse(best[0] if isinstance(request.inputs, str) else best)

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=8080)
    chosen = parser.parse_args()
    # As `llmcache serve`, and uvicorn's own defaults, so that other installed packages change neither.
    uvicorn.run(create_app(chosen.folder), port=chosen.port, access_log=False, loop="asyncio", http="h11")
