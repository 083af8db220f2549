"""One model, served over HTTP in the words of text-embeddings-inference and of OpenAI.

    request -> key, limits -> tokens -> looked up at once: a hit is answered without queueing
            -> a miss waits a few ms, and is computed with others of its length, in the one thread that runs the model

Needs the extra `serve`. `llmcache serve` starts it; `create_app` makes the ASGI application.
"""
