"""HTTP only: OpenAI's routes and shapes, server-sent events, metrics and health, over an engine client."""
