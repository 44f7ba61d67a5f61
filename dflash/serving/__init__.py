"""HTTP server: endpoints of OpenAI, vLLM and SGLang, streaming, metrics, and a web page."""
