"""A policy with its tools behind an OpenAI-compatible ``/v1/chat/completions``."""
