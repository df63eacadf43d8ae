"""One OpenAI endpoint in front of prefill and decode engines: selection, relaying, failure handling.

Runs without torch and vLLM. `python -m proxy` serves; `proxy.app:create_app(settings)` builds the ASGI app.
"""
