"""What a program costs, read from its jaxpr and from the optimised HLO of its executable. Text and counts only.

`matmul_flops` counts what was traced, before a compiler hides it in kernels. `large_moves` finds the copies that a
paged engine must not make. `launches` counts what a GPU would launch one by one.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4}
_RESULT = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = \(?(\w+)\[([\d,]*)\].*? ([\w-]+)\(")
_MOVES = {"copy", "copy-start", "convert", "transpose", "concatenate"}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_BODY = re.compile(r"\bcondition=%?([\w.-]+), body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":{"n":"(\d+)"}')
_CONSTANT = re.compile(r"%?([\w.-]+) = s32\[\]\S* constant\((\d+)\)")
_BOUND = re.compile(r"ROOT .* compare\(.*?%?([\w.-]+)\), direction=LT")
# Instructions that move nothing and launch nothing.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "after-all", "copy-done", "async-done", "partition-id", "iota",
}  # fmt: skip


def matmul_flops(jaxpr: Any) -> int:
    """Floating-point operations of every matmul in a (closed) jaxpr, two a multiply-add; a scan's body as often as
    it runs, that of a loop without a count once; a kernel's as it says itself (attention's depend on the rows: none).
    """
    total = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * math.prod(left[d] for d in contracted)
        elif name in ("ragged_dot", "ragged_dot_general"):
            total += 2 * eqn.outvars[0].aval.size * eqn.invars[0].aval.shape[-1]
        elif name == "scan":
            total += eqn.params["length"] * matmul_flops(eqn.params["jaxpr"])
        elif name == "cond":
            total += max(matmul_flops(branch) for branch in eqn.params["branches"])
        elif name == "pallas_call":
            cost = eqn.params["cost_estimate"]
            total += 0 if cost is None else cost.flops
        else:
            total += sum(matmul_flops(inner) for inner in _inner(eqn.params))
    return total


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
            yield value


def large_moves(text: str, size: int, shapes: tuple[tuple[int, ...], ...] = ()) -> list[str]:
    """Copies, converts, transposes and concatenations in optimised HLO whose result has `size` bytes or more, or has
    the dimensions of one of `shapes` in any order.
    """
    pools = {_dimensions(shape) for shape in shapes}
    found: list[str] = []
    for line in text.splitlines():
        match = _RESULT.match(line)
        if match is None or match[3] not in _MOVES:
            continue
        shape = tuple(int(n) for n in match[2].split(",") if n)
        if math.prod(shape) * _BYTES.get(match[1], 8) >= size or _dimensions(shape) in pools:
            found.append(line.strip()[:200])
    return found


def _dimensions(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(n for n in shape if n != 1))


def launches(text: str) -> int:
    """Instructions that a step runs one by one: those of the entry computation, and those of loop bodies as often as
    they run, once where that is not known.
    """
    found: dict[str, _Computation] = {}
    entry, here = "", None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head is not None:
            entry = head[2] if head[1] else entry
            here = found[head[2]] = _Computation()
        elif " = " in line and here is not None:
            here.read(line)
    return _count(entry, found) if entry else 0


@dataclass
class _Computation:
    """Its own launches, its loops (condition, body, trips if told), and where it is a condition its index's bound."""

    launches: int = 0
    loops: list[tuple[str, str, int | None]] = field(
        default_factory=list[tuple[str, str, int | None]]
    )
    constants: dict[str, int] = field(default_factory=dict[str, int])
    bound: int | None = None

    def read(self, line: str) -> None:
        self.launches += _opcode(line) not in _FREE
        told = _TRIPS.search(line)
        for condition, body in _BODY.findall(line):
            self.loops.append((condition, body, int(told[1]) if told else None))
        constant, bound = _CONSTANT.search(line), _BOUND.search(line)
        if constant is not None:
            self.constants[constant[1]] = int(constant[2])
        elif bound is not None:
            self.bound = self.constants.get(bound[1])


def _count(name: str, found: Mapping[str, _Computation]) -> int:
    total = found[name].launches
    for condition, body, told in found[name].loops:
        total += (told or found[condition].bound or 1) * _count(body, found)
    return total


def _opcode(line: str) -> str:
    match = re.search(r" = (?:\([^=]*?\)|\S+) ([\w-]+)\(", line)
    return match[1] if match else ""
