"""A client that measures any OpenAI-compatible server the same way: load, answers, arms, statistics, records, reports."""
