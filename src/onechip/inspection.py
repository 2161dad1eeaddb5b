"""`onechip inspect`: a model's layer table and its costs, found without reading a weight, and how they are printed.

A checkpoint is opened and checked strictly, tensor by tensor, as the engine does; a directory that holds nothing but
its configuration is described from that alone. Owns the wording; the arithmetic is `model.account`.
"""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from onechip import printing
from onechip.checkpoint.source import is_bare, open_checkpoint
from onechip.config import DTypeName, LayerSpec, ModelConfig, Rope
from onechip.errors import DoesNotFit
from onechip.model import account
from onechip.model.params import check_tensors
from onechip.model.spec import model_config


@dataclass(frozen=True)
class Inspection:
    """What was found. `fits` has one entry a chip that holds the model, `misfits` why the others do not."""

    source: str
    bare: bool
    config: ModelConfig
    dtype: DTypeName
    kv_dtype: DTypeName
    costs: account.Account
    fits: tuple[account.Fit, ...]
    misfits: dict[str, str]


def examine(
    model: str, dtype: DTypeName, kv_dtype: DTypeName, chip: str | None, sequences: int
) -> Inspection:
    """Open `model` and account for it. Raises StartupError; DoesNotFit only for a chip that was named."""
    chips = [account.find_chip(chip)] if chip else list(account.CHIPS.values())
    bare = is_bare(model)
    with_tensors = open_checkpoint(model, random_weights=bare)
    config = model_config(with_tensors.config)
    if not bare:
        found = {name: info.shape for name, info in with_tensors.tensors.items()}
        check_tensors(config, found, with_tensors.source)
    costs = account.account(config, dtype, kv_dtype)
    fits: list[account.Fit] = []
    misfits: dict[str, str] = {}
    for candidate in chips:
        try:
            fits.append(account.fit(costs, candidate, sequences))
        except DoesNotFit as error:
            if chip:
                raise
            misfits[candidate.name] = error.message
    return Inspection(
        with_tensors.source, bare, config, dtype, kv_dtype, costs, tuple(fits), misfits
    )


def as_dict(found: Inspection) -> dict[str, Any]:
    """The inspection as plain data; every size in bytes."""
    return {
        "model": found.source,
        "family": found.config.family,
        "dtype": found.dtype,
        "kv_dtype": found.kv_dtype,
        "layers": [_layer_dict(found, layer) for layer in found.config.layers],
        **asdict(found.costs),
        "chips": [
            {**asdict(fit.chip), **{k: v for k, v in asdict(fit).items() if k != "chip"}}
            for fit in found.fits
        ],
        "does_not_fit": found.misfits,
    }


def _layer_dict(found: Inspection, layer: LayerSpec) -> dict[str, Any]:
    return {
        **asdict(layer),
        "parameters": account.layer_parameters(found.config, layer),
        "kv_bytes": account.layer_kv_bytes(layer, found.kv_dtype),
    }


def show(found: Inspection, console: Console | None = None) -> None:
    """Print the inspection as tables. Where output is no terminal, lines are not cut at 80 columns."""
    console = printing.console(console, least=120)
    console.print(
        f"[bold]{found.source}[/bold], {found.config.family}, {len(found.config.layers)} layers"
    )
    if found.bare:
        console.print(
            "No weights lie beside config.json: the sizes follow from the configuration alone."
        )
    for table in (_layer_table(found), _cost_table(found), _chip_table(found)):
        console.print(table)


def _layer_table(found: Inspection) -> Table:
    columns = (
        "layer",
        "<kind",
        "K/V of",
        "q heads",
        "kv heads",
        "head dim",
        "window",
        "<rope",
        "ffn",
    )
    table = printing.table("Layers", (*columns, "M params", "K/V B/token"))
    for layer in found.config.layers:
        table.add_row(
            str(layer.index),
            layer.kind,
            "own" if layer.owns_kv else str(layer.kv_source),
            str(found.config.heads),
            f"{layer.kv_heads}{' K=V' if layer.k_eq_v else ''}",
            str(layer.head_dim),
            str(layer.window or "all"),
            _rope_text(layer.rope),
            str(layer.ffn_dim),
            f"{account.layer_parameters(found.config, layer) / 1e6:,.1f}",
            f"{account.layer_kv_bytes(layer, found.kv_dtype):,}",
        )
    return table


def _rope_text(rope: Rope) -> str:
    extent = {"default": "", "linear": f" /{rope.factor:g}", "proportional": f" x{rope.partial:g}"}
    return f"{rope.theta:,.0f}{extent[rope.kind]}"


def _cost_table(found: Inspection) -> Table:
    costs, table = found.costs, printing.table("Costs", ("<what", "amount", "<note"))
    extra = f"; vectors kept in float32 add {costs.widened / 1e6:.1f} MB" if costs.widened else ""
    table.add_row("parameters", f"{costs.parameters / 1e9:.3f} B", "text model")
    table.add_row(
        "resident", f"{costs.resident / 1e9:.3f} GB", f"every parameter in {found.dtype}{extra}"
    )
    table.add_row(
        "streamed a token", f"{costs.streamed / 1e9:.3f} GB", _streamed_note(found.config)
    )
    table.add_row("gathered a token", f"{costs.gathered:,} B", "rows of the embedding tables")
    table.add_row(
        "K/V a token",
        f"{costs.kv_token:,} B",
        f"full-attention layers that own K/V, {found.kv_dtype}",
    )
    window = f"sliding layers that own K/V, {found.config.window or 0} tokens at most"
    table.add_row("K/V a sequence", f"{costs.kv_window / 2**20:,.2f} MiB", window)
    return table


def _streamed_note(config: ModelConfig) -> str:
    note = "one decode step of one sequence; lookup tables are not streamed"
    if config.moe is not None:
        note += f"; {config.moe.top_k} of {config.moe.experts} experts"
    return note


def _chip_table(found: Inspection) -> Table:
    sequences = found.fits[0].sequences if found.fits else 0
    columns = (
        "<chip",
        "memory GB",
        "GB/s",
        "K/V GB",
        f"tokens, {sequences} running",
        "<bound for one sequence",
    )
    table = printing.table("What fits", columns)
    for fit in found.fits:
        table.add_row(
            fit.chip.name,
            f"{fit.chip.memory / 1e9:.1f}",
            f"{fit.chip.bandwidth / 1e9:,.0f}",
            f"{fit.free / 1e9:.2f}",
            f"{fit.tokens:,}",
            f"{fit.tokens_per_second:,.0f} tokens/s at full bandwidth",
        )
    for name in found.misfits:
        chip = account.CHIPS[name]
        table.add_row(
            name,
            f"{chip.memory / 1e9:.1f}",
            f"{chip.bandwidth / 1e9:,.0f}",
            "-",
            "-",
            "does not fit",
        )
    return table
