"""onechip: Gemma on one chip. `from onechip import LLM, SamplingParams` is the offline API; `onechip serve` the server.

The names are imported on first use, so that client-side commands never load jax.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onechip.llm import LLM as LLM
    from onechip.request import SamplingParams as SamplingParams
    from onechip.request import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from onechip.llm import LLM

        return LLM
    if name == "SamplingParams":
        from onechip.request import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from onechip.request import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module 'onechip' has no attribute {name!r}")
