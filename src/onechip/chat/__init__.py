"""Text and dialect: tokenizer, chat template, incremental detokenisation, stop strings, and the state machine that
reads thoughts and tool calls. Never pages, never jax. `from onechip.chat import parse` reads a whole answer.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onechip.chat.parsing import parse as parse

__all__ = ["parse"]


def __getattr__(name: str) -> Any:
    if name == "parse":  # on first use: callers of other modules need no more than those
        from onechip.chat.parsing import parse

        return parse
    raise AttributeError(f"module 'onechip.chat' has no attribute {name!r}")
