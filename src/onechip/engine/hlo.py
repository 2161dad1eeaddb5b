"""What a program costs, read from its jaxpr and from the optimised HLO of its executable. Text and counts only.

`matmul_flops` counts what was traced, before a compiler hides it in kernels; loops count one trip. `large_moves` finds
the copies that a paged engine must not make. `launches` counts what a GPU would launch one by one.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4}
_RESULT = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = \(?(\w+)\[([\d,]*)\].*? ([\w-]+)\(")
_MOVES = {"copy", "copy-start", "convert", "transpose", "concatenate"}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_BODY = re.compile(r"\bbody=%?([\w.-]+)")
# Instructions that move nothing and launch nothing.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "after-all", "copy-done", "async-done", "partition-id", "iota",
}  # fmt: skip


def matmul_flops(jaxpr: Any) -> int:
    """Floating-point operations of every matmul in a (closed) jaxpr, two a multiply-add; a loop's body once."""
    total = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * math.prod(left[d] for d in contracted)
        elif name in ("ragged_dot", "ragged_dot_general"):
            total += 2 * eqn.outvars[0].aval.size * eqn.invars[0].aval.shape[-1]
        elif name == "cond":
            total += max(matmul_flops(branch) for branch in eqn.params["branches"])
        elif name != "pallas_call":
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
    """Instructions that a step runs one by one: those of the entry computation and, once each, of loop bodies."""
    counts: dict[str, int] = {}
    bodies: dict[str, set[str]] = {}
    entry = here = ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head is not None:
            here = head[2]
            entry = here if head[1] else entry
            counts[here], bodies[here] = 0, set()
        elif " = " in line and here:
            counts[here] += _opcode(line) not in _FREE
            bodies[here].update(_BODY.findall(line))
    return _with_bodies(entry, counts, bodies) if entry else 0


def _with_bodies(name: str, counts: dict[str, int], bodies: dict[str, set[str]]) -> int:
    return counts[name] + sum(_with_bodies(body, counts, bodies) for body in bodies[name])


def _opcode(line: str) -> str:
    match = re.search(r" = (?:\([^=]*?\)|\S+) ([\w-]+)\(", line)
    return match[1] if match else ""
