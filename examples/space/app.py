"""A page for a Hugging Face Space: a classifier with and without a cache, on texts that visitors type."""

import os
from time import perf_counter

import gradio as gr
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from llmcache import LLMCache

NAME = os.environ.get("MODEL", "distilbert/distilbert-base-uncased-finetuned-sst-2-english")

tokenizer = AutoTokenizer.from_pretrained(NAME)
model = AutoModelForSequenceClassification.from_pretrained(NAME).eval()
cache = LLMCache.wrap(model, tokenizer=tokenizer)


def classify(text: str) -> tuple[dict[str, float], str, str]:
    """Return the labels' probabilities, how the text was served and how fast, and the cache's figures."""
    if not text.strip():
        raise gr.Error("Type a text first.")
    inputs = tokenizer(text, truncation=True, return_tensors="pt")
    with cache.disabled():
        began = perf_counter()
        cache(**inputs)
        plain_ms = 1e3 * (perf_counter() - began)
    began = perf_counter()
    logits = cache(**inputs).logits[0]
    ms = 1e3 * (perf_counter() - began)
    shares = torch.softmax(logits, 0).tolist()
    served = f"{cache.last[0].rung or 'computed'} in {ms:.1f} ms; without the cache {plain_ms:.1f} ms"
    return {model.config.id2label[i]: share for i, share in enumerate(shares)}, served, cache.stats()._repr_html_()


with gr.Blocks(title="llmcache") as page:
    gr.Markdown("# llmcache\nClassify a text twice: the second time it comes from memory, with the same answer.")
    text = gr.Textbox(label="Text", placeholder="The parcel came late again.")
    button = gr.Button("Classify", variant="primary")
    with gr.Row():
        labels = gr.Label(label="Answer", num_top_classes=5)
        served = gr.Textbox(label="Served by", interactive=False)
    figures = gr.HTML()
    for event in (text.submit, button.click):
        event(classify, text, [labels, served, figures])

if __name__ == "__main__":
    page.launch()
