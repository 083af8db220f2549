"""The servers that people write themselves, which `llmcache serve` is compared with: FastAPI and a model.

    python -m experiments.baseline_server FOLDER --port 8080                   plain transformers
    python -m experiments.baseline_server FOLDER --port 8080 --onnx float32    ONNX Runtime, the whole model exported
    python -m experiments.baseline_server FOLDER --port 8080 --onnx int8       the same with dynamic int8 products

FOLDER holds a BERT with a linear head on the mean of its states, as sentence-transformers saves it. A request is a call
of the model; requests are not batched. FastAPI runs the route in its pool of threads: texts are tokenised there at the
same time, and a lock lets one of them compute at a time, on all of torch's threads.
"""

import argparse
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoTokenizer

from experiments.models.heads import PooledClassifier
from experiments.models.onnx import OnnxModel, export
from llmcache.lab import quantise


class Predict(BaseModel):
    inputs: str | list[str]


def create_app(folder: str, precision: str | None = None) -> FastAPI:
    tokenizer, trunk = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    weights = load_file(f"{folder}/2_Dense/model.safetensors")
    head = nn.Linear(*reversed(weights["linear.weight"].shape))
    head.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
    labels = [trunk.config.id2label[i] for i in range(trunk.config.num_labels)]
    model: nn.Module = PooledClassifier(trunk, "mean", head).eval()
    if precision is not None:
        with TemporaryDirectory() as place:  # the session keeps what it has read
            graph = export(model, dict(tokenizer("a text", return_tensors="pt")), Path(place, "model.onnx"))
            model = OnnxModel(quantise(graph, Path(place, "int8.onnx")) if precision == "int8" else graph)
    app, lock = FastAPI(), threading.Lock()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/predict")
    def predict(request: Predict) -> JSONResponse:
        texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with lock, torch.inference_mode():
            scores = model(**inputs).softmax(-1).tolist()
        named = [[{"label": label, "score": score} for label, score in zip(labels, row, strict=True)] for row in scores]
        best = [sorted(row, key=lambda one: -one["score"]) for row in named]
        return JSONResponse(best[0] if isinstance(request.inputs, str) else best)

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--onnx", choices=["float32", "int8"])
    chosen = parser.parse_args()
    # As `llmcache serve`, and uvicorn's own defaults, so that other installed packages change neither.
    uvicorn.run(create_app(chosen.folder, chosen.onnx), port=chosen.port, access_log=False, loop="asyncio", http="h11")
