"""The kernels of a gate: where its parts are, for the text of the prelude."""

from __future__ import annotations

from eqaccel.families.gate.spec import GatedChannels, GateSpec


def print_gate(spec: GateSpec) -> str:
    """The body of all directions; `gate.h` has the functions."""
    parts = spec.parts
    activations = list(dict.fromkeys(part.activation for part in parts))
    lines = ["namespace {"]
    for number, (kind, factor) in enumerate(activations):
        lines.append(f"struct Activation{number} {{")
        lines.append(f"  static constexpr double factor = {float(factor)!r};")
        lines.append(f"  EQ_FN static Curve of(V x) {{ return {kind}_curve(x); }}")
        lines.append("};")
    lines += [
        "struct Problem {",
        f"  static constexpr int x_dim = {spec.num_inputs}, z_dim = {spec.num_outputs};",
        f"  static constexpr int activations = {spec.num_activations};",
        "  template <class F>",
        "  static EQ_FN void each_part(const F& run) {",
    ]
    first = output = 0
    for part in parts:
        words = [f"Activation{activations.index(part.activation)}", first, part.mul, part.first, output]
        name = "Scalars"
        if isinstance(part, GatedChannels):
            name = "Gated"
            words += [part.column, part.dim]
        lines.append(f"    run({name}<{', '.join(map(str, words))}>());")
        first, output = first + part.mul, output + part.num_outputs
    return "\n".join([*lines, "  }", "};", "}  // namespace", "EQ_EXPORT_GATE(Problem)", ""])
