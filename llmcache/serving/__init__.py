"""Serves one model over HTTP with the routes of text-embeddings-inference (TEI) and of OpenAI.

    request -> API key, limits -> tokens -> lookup: a hit is answered without queueing
            -> a miss waits a few ms and is computed in a batch with misses of similar length, on the one model thread

Needs the extra `serve`. `llmcache serve` starts the server; `create_app` makes the ASGI application.
"""
