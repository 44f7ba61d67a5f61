"""An HTTP server over the scheduler: OpenAI's endpoints and others, streaming, metrics, a page."""
