"""How the layers lie on the device: each alone, or equal ones stacked and run in loops (`config.scan_layers`).

Gemma's layer table repeats: four or five sliding layers, then one with full attention. `runs` finds the repeats on
either side of the early exit, E4B: 24 = 4 x 6 layers that own K/V, 18 = 3 x 6 that share it. A run's weights are
stacked along a leading axis of turns, and what is compiled is its places, not its layers; all layers of a kind then
keep their K/V in one store, one layer's pages behind the other's. Unrolled, a run is one layer and a store one layer's.
Owns which layer is where; knows no arrays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from onechip.config import LayerSpec, ModelConfig


@dataclass(frozen=True)
class Run:
    """`turns` times the same `size` layers from `start` on: place p of turn t is layer start + t size + p.

    `entry` is where the first place's weights lie in params["layers"]; the other places' follow.
    """

    start: int
    size: int
    turns: int
    entry: int

    @property
    def stop(self) -> int:
        """The layer after its last."""
        return self.start + self.size * self.turns

    def layers(self, place: int) -> range:
        """The layers that are this place, in order of the turns."""
        return range(self.start + place, self.stop, self.size)


@dataclass(frozen=True)
class Store:
    """The layers whose K/V lies in one array, one layer's pages behind the other's."""

    owners: tuple[LayerSpec, ...]


def why_not(config: ModelConfig) -> str | None:
    """Why its layers cannot be scanned; None if they can."""
    if config.moe is not None:
        return "a kernel that reads some experts would be handed a copy of all of a layer's"
    if all(run.turns == 1 for run in runs(replace(config, scan_layers=True))):
        return "no layers repeat"
    return None


@lru_cache
def runs(config: ModelConfig) -> tuple[Run, ...]:
    """All layers, in order. No run goes past `config.first_shared`, where a prompt leaves early."""
    found: list[Run] = []
    for stop in (config.first_shared, len(config.layers)):
        start = found[-1].stop if found else 0
        alike = [_alike(layer) for layer in config.layers[:stop]]
        while start < stop:
            size, turns = _repeat(alike[start:]) if config.scan_layers else (1, 1)
            entry = found[-1].entry + found[-1].size if found else 0
            found.append(Run(start, size, turns, entry))
            start = found[-1].stop
    return tuple(found)


@lru_cache
def stores(config: ModelConfig) -> tuple[Store, ...]:
    """One a layer that owns K/V, or with `scan_layers` one a layer kind."""
    if config.scan_layers:
        return _by_kind(config)
    return tuple(Store((layer,)) for layer in config.owners)


def store_of(config: ModelConfig, layer: LayerSpec) -> tuple[int, int]:
    """(the number of the store that a layer reads, how many layers' pages come before those)."""
    return next(
        (number, [owner.index for owner in store.owners].index(layer.kv_source))
        for number, store in enumerate(stores(config))
        if any(owner.index == layer.kv_source for owner in store.owners)
    )


def entries(config: ModelConfig) -> Iterator[range]:
    """The layers of each entry of params["layers"]: several are stacked along a leading axis."""
    for run in runs(config):
        for place in range(run.size):
            yield run.layers(place)


def _repeat(alike: Sequence[LayerSpec]) -> tuple[int, int]:
    """(layers of a turn, turns) from the first layer on: what leaves the fewest to compile; (1, 1) if none repeat."""
    found = [(1, 1)]
    for size in range(1, len(alike) // 2 + 1):
        same = next((i for i in range(size, len(alike)) if alike[i] != alike[i - size]), len(alike))
        found.append((size, same // size))
    return max(found, key=lambda run: (run[0] * (run[1] - 1), -run[0]))


def _alike(layer: LayerSpec) -> LayerSpec:
    """What layers must have in common to be the same program."""
    return replace(layer, index=0, kv_source=0 if layer.owns_kv else -1)


def _by_kind(config: ModelConfig) -> tuple[Store, ...]:
    kinds = dict.fromkeys(layer.kind for layer in config.owners)
    return tuple(Store(tuple(o for o in config.owners if o.kind == kind)) for kind in kinds)
