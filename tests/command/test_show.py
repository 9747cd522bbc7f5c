"""The command `show` prints the kernels of every family as they are shipped."""

from __future__ import annotations

import pytest

from eqaccel import LinearSpec, PolynomialSpec, runtime
from eqaccel.__main__ import main
from eqaccel.codegen import SCALAR_BYTES, Direction
from eqaccel.errors import SpecError
from eqaccel.families import FAMILIES
from eqaccel.families.polynomial import Term
from eqaccel.families.radial_basis import RadialBasisSpec
from eqaccel.families.silu import SiluSpec
from eqaccel.targets import TARGETS, host_target

WORDS = {"tensor_product": ("4x0e+4x1o", "0e+1o", "4x0e+4x1o"), "linear": ("4x0e+4x1o", "4x0e+4x1o", "2")}
"""Of specs that are smaller than the examples."""

ARCHS = [target for target in TARGETS.values() if target.is_gpu]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(["show", *arguments])
    output = capsys.readouterr()
    return output.err if status else output.out[:-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_sources_are_those_that_are_shipped(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On every target, in every direction and dtype; where there is no kernel it says which there are."""
    family, words = FAMILIES[name], WORDS.get(name, ())
    spec = family.read_spec(words)
    payloads = {direction: family.payload_of(spec, direction) for direction in Direction}
    programs = {direction: made and runtime.Program(made[0]) for direction, made in payloads.items()}
    found = 0
    for target in (host_target(), *ARCHS):
        for direction in Direction:
            for scalar in SCALAR_BYTES:
                kernel = (target.backend, scalar, direction.value, target.name if target.is_gpu else None)
                options = ["--target", target.name, "--direction", direction.value, "--dtype", scalar]
                text = shown(capsys, *words, "--family", name, *options, "--stage", "source")
                program = programs[direction]
                arch = program.compile_arch(*kernel) if program else None
                if not program or arch is None:
                    assert text.startswith(f"eqaccel: {name}: expected a kernel that there is on {target.name} (")
                else:
                    tables = "" if target.is_gpu else family.cpu_tables(spec, direction)
                    lines = [f"// tables: {line}\n" for line in tables.splitlines()]
                    assert text == program.source(*kernel[:3], arch) + "".join(lines)
                    assert tables.encode() in payloads[direction][0]
                    found += 1
    assert found


@pytest.mark.parametrize("name", FAMILIES)
def test_examples_are_specs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    family = FAMILIES[name]
    assert bool(family.words) == bool(family.examples)
    for number, (example, words) in enumerate(family.examples.items()):
        spec = family.read_spec(words)
        assert family.read_spec([example]) == spec
        assert number or family.read_spec() == spec
        assert shown(capsys, example, "--family", name, "--stage", "spec") == str(spec)
    plan = shown(capsys, "--family", name, "--target", "sm_90")
    assert plan == family.explain(family.read_spec(), Direction.FORWARD, TARGETS["sm_90"], 4)


def test_words_become_specs() -> None:
    linear, polynomial, radial, silu = (FAMILIES[name] for name in ("linear", "polynomial", "radial_basis", "silu"))
    paths = ((0, 0, 0.25), (0, 2, 0.25), (1, 1, 0.5), (2, 0, 0.25), (2, 2, 0.25))
    assert linear.read_spec(["3x0e+2x1o+5x0e", "2x0e+4x1o+1x0e", "num_attributes=2"]) == LinearSpec(
        "3x0e+2x1o+5x0e", "2x0e+4x1o+1x0e", paths, 2
    )
    terms = (Term(0, 1, (0, 2), -0.5), Term(1, 0, (), 2000.0))
    assert polynomial.read_spec(["z0 = -0.5 w1 x0 x2; z1 = 2e3 w0;"]) == PolynomialSpec(3, 2, 2, terms)
    assert radial.read_spec(["8", "5", "power=6", "is_undefined_at_zero=yes"]) == RadialBasisSpec(
        8, 5.0, 6, is_undefined_at_zero=True
    )
    assert silu.read_spec(["scale=0.5"]) == SiluSpec(1.0, 0.5)
    signs = [
        FAMILIES["tensor_product"].read_spec(["4x1o", "2e", "4x2o", f"convention={convention}"]).paths[0].coefficient
        for convention in ("e3nn<0.5", "e3nn>=0.5")
    ]
    assert signs[0] == -signs[1]


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("silu", ["fast"], "factor: could not convert string to float: 'fast'"),
        ("silu", ["1", "2", "3"], r"spec: expected \[factor=...\] \[scale=...\], got '3' besides"),
        ("silu", ["1", "factor=2"], "factor: expected it once, got it twice, the second time as 'factor=2'"),
        ("radial_basis", ["8", "power=5"], r"spec: expected NUM_BASIS R_MAX POWER .*, got none of r_max"),
        ("radial_basis", ["8", "5", "6", "is_undefined_at_zero=1"], "expected yes or no, got '1'"),
        ("polynomial", ["z0 = w0"], "terms: expected terms such as 'z0 = 0.5 w0 x0 x1', got 'z0 = w0'"),
        ("neighbors", ["all"], "spec: expected no words, got 'all' besides"),
    ],
)
def test_what_cannot_be_read(name: str, words: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        FAMILIES[name].read_spec(words)


def test_other_targets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "eqaccel: --target: expected one of cpu-avx512, " in shown(capsys, "--target", "sm_1")


def test_help_lists_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    text = capsys.readouterr().out
    assert all(f"  --family {name} " in text for name in FAMILIES)
    assert all(f"    {example}: " in text for family in FAMILIES.values() for example in family.examples)
