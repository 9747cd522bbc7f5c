"""Pictures of results, in the manner of the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eqaccel.benchmarks.report import DIRECTIONS, Results, Row, best

_FAMILY_COLOURS = {
    "eqaccel": "#0b6e99",
    "cuEquivariance": "#edae49",
    "OpenEquivariance": "#d1495b",
    "e3nn": "#8f8f8f",
}
_COLOURS = ("#0b6e99", "#5fb3ce", "#edae49", "#d1495b", "#7a5195", "#8f8f8f", "#66a182", "#b07aa1", "#e07b39")
_MARKERS = {"forward": "o", "backward": "s", "double_backward": "^"}

Series = Mapping[str, Sequence[float | None]]


def draw_products(results: Results, path: Path) -> list[Path]:
    """Throughput, roofline and, where there are convolutions without fusion to compare with, speed-ups."""
    pictures = {"": throughput, "_roofline": roofline, "_speedup": fused_speedups}
    named = ((draw, path.with_name(f"{path.stem}{end}{path.suffix}")) for end, draw in pictures.items())
    return [written for draw, name in named for written in draw(results, name)]


def throughput(results: Results, path: Path) -> list[Path]:
    """Tensor products a second, of the best variant of each library: a panel for each graph and direction."""
    graphs, problems, directions = (_distinct(results, key) for key in ("graph", "problem", None))
    problems = [name for name in problems if any(row["problem"] == name and _timed(row) for row in results["rows"])]
    figure, panels = _grid(len(graphs), len(directions), 1.2 + 0.32 * len(problems), 2.4)
    for i, graph in enumerate(graphs):
        for j, direction in enumerate(directions):
            cases = [
                [row for row in results["rows"] if row["graph"] == graph and row["problem"] == problem]
                for problem in problems
            ]
            series = {
                name: [_rate(best(rows, direction, [name]), direction) for rows in cases] for name in _FAMILY_COLOURS
            }
            floors = [_floor_rate(rows, direction) for rows in cases]
            _bars(panels[i][j], problems, series, floors, _FAMILY_COLOURS)
            panels[i][j].set_title(f"{graph}, {direction.replace('_', ' ')}", fontsize=9)
            if i + 1 < len(graphs):
                panels[i][j].set_xticklabels([])
    for row in panels:
        row[0].set_ylabel("tensor products a second")
    return [_save(figure, panels, path, f"Throughput, {_where(results)}")]


def roofline(results: Results, path: Path) -> list[Path]:
    """Floating-point operations a second against arithmetic intensity, under the limits that were measured."""
    graphs, problems = (_distinct(results, key) for key in ("graph", "problem"))
    bandwidth, peak = (results["roofline"][key] for key in ("bandwidth_gb_s", "fma_peak_gf_s"))
    if not graphs or not peak:
        return []
    graph = max(graphs, key=lambda name: sum(row["graph"] == name for row in results["rows"]))
    cases = [[r for r in results["rows"] if r["graph"] == graph and r["problem"] == problem] for problem in problems]
    figure, panels = _grid(1, 1, 6.4, 3.6)
    axes = panels[0][0]
    intensities = []
    for direction, marker in _MARKERS.items():
        for name, colour in _FAMILY_COLOURS.items():
            rows = [row for row in (best(rows, direction, [name]) for rows in cases) if row is not None]
            points = [_intensity_and_rate(row[direction]) for row in rows]
            if points:
                axes.scatter(*zip(*points, strict=True), s=26, marker=marker, color=colour, linewidths=0)
                axes.scatter([], [], s=26, marker="o", color=colour, label=name)
            intensities += [x for x, _ in points]
    low, high = min(intensities) / 1.5, max(intensities) * 1.5
    bend = min(max(peak / bandwidth, low), high)
    axes.plot([low, bend], [low * bandwidth, bend * bandwidth], color="black", linewidth=1, label="memory")
    axes.plot([bend, high], [peak, peak], color="black", linewidth=1, linestyle="--", label="arithmetic")
    for direction, marker in _MARKERS.items():
        axes.scatter([], [], s=26, marker=marker, color="#404040", label=direction.replace("_", " "))
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_numbers(axes.xaxis)
    _plain_numbers(axes.yaxis)
    axes.set_xlabel("operations a byte of the floor")
    axes.set_ylabel("GF/s")
    return [_save(figure, panels, path, f"Roofline, {graph}, {_where(results)}")]


def fused_speedups(results: Results, path: Path) -> list[Path]:
    """Speed of every fused convolution over gather, product and scatter, of cuEquivariance or of e3nn."""
    implementations = _distinct(results, "implementation")
    baseline = next((name for name in ("cuEquivariance scatter", "e3nn") if name in implementations), None)
    if results["benchmark"] != "kernels" or baseline is None:
        return []
    rows = [row for row in results["rows"] if row["problem"] == results["rows"][0]["problem"]]
    graphs, directions = _distinct(results, "graph"), _distinct(results, None)
    figure, panels = _grid(1, len(directions), 1.0 + 0.8 * len(graphs), 2.6)
    for axes, direction in zip(panels[0], directions, strict=True):

        def speed(name: str, graph: str, direction: str = direction) -> float | None:
            times = [
                _time(next((r for r in rows if (r["implementation"], r["graph"]) == (which, graph)), None), direction)
                for which in (baseline, name)
            ]
            return None if None in times else times[0] / times[1]

        series = {name: [speed(name, graph) for graph in graphs] for name in implementations if name != baseline}
        colours = dict(zip(series, _COLOURS * 2, strict=False))
        _bars(axes, graphs, series, [], colours, log=False)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_title(direction.replace("_", " "), fontsize=9)
    panels[0][0].set_ylabel(f"speed over {baseline}")
    return [_save(figure, panels, path, f"Fused convolutions, {rows[0]['problem']}, {_where(results)}")]


def scaling(results: Results, path: Path) -> list[Path]:
    """Time against the number of edges, with the floor; a line of panels for each problem."""
    directions, problems, implementations = (_distinct(results, key) for key in (None, "problem", "implementation"))
    figure, panels = _grid(len(problems), len(directions), 3.6, 2.8)
    for line, problem in zip(panels, problems, strict=True):
        for axes, direction in zip(line, directions, strict=True):
            rows = [row for row in results["rows"] if row["problem"] == problem and direction in row]
            for name, colour in zip(implementations, _COLOURS * 2, strict=False):
                points = sorted((r["edges"], r[direction]["median_ms"]) for r in rows if r["implementation"] == name)
                _curve(axes, name, points, colour)
            floors = sorted({(row["edges"], _floor(row, direction)) for row in rows})
            if floors:
                axes.plot(*zip(*floors, strict=True), color="black", linewidth=1, linestyle="--", label="floor")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("edges")
            axes.set_title(f"{problem}, {direction.replace('_', ' ')}", fontsize=9)
        line[0].set_ylabel("milliseconds")
    return [_save(figure, panels, path, _where(results))]


def by_graph(results: Results, path: Path) -> list[Path]:
    """Nanoseconds an edge, of the best variant of each library on each graph; a column for each problem."""
    directions, graphs, problems = (_distinct(results, key) for key in (None, "graph", "problem"))
    figure, panels = _grid(len(directions), len(problems), 2 + 0.7 * len(graphs), 2.2)
    for line, direction in zip(panels, directions, strict=True):
        for axes, problem in zip(line, problems, strict=True):
            of_problem = [row for row in results["rows"] if row["problem"] == problem]
            cases = [[row for row in of_problem if row["graph"] == graph] for graph in graphs]

            def cost(row: Row | None, direction: str = direction) -> float | None:
                return None if row is None else 1e6 * row[direction]["median_ms"] / row["edges"]

            series = {name: [cost(best(rows, direction, [name])) for rows in cases] for name in _FAMILY_COLOURS}
            timed = [next((row for row in rows if direction in row), None) for rows in cases]
            floors = [None if row is None else 1e6 * _floor(row, direction) / row["edges"] for row in timed]
            _bars(axes, graphs, series, floors, _FAMILY_COLOURS)
            _plain_numbers(axes.yaxis)
            axes.set_title(f"{problem}, {direction.replace('_', ' ')}", fontsize=9)
            if direction != directions[-1]:
                axes.set_xticklabels([])
        line[0].set_ylabel("ns an edge")
    return [_save(figure, panels, path, _where(results))]


def by_machine(results: Results, path: Path) -> list[Path]:
    """Nanoseconds an edge as planned for machines of each class, with the floor; a panel for each direction."""
    directions, problems = (_distinct(results, key) for key in (None, "problem"))
    sizes = sorted({row["shared_kib"] for row in results["rows"]}, reverse=True)
    figure, panels = _grid(1, len(directions), 1.5 + 0.45 * len(problems), 2.8)
    rows = {(row["problem"], row["shared_kib"]): row for row in results["rows"]}
    colours = {f"{kib} KiB": colour for kib, colour in zip(sizes, _COLOURS, strict=False)}
    for axes, direction in zip(panels[0], directions, strict=True):
        series = {
            f"{kib} KiB": [_nanoseconds(rows.get((name, kib)), direction, _time) for name in problems] for kib in sizes
        }
        floors = [_nanoseconds(rows.get((name, sizes[0])), direction, _floor) for name in problems]
        _bars(axes, problems, series, floors, colours)
        axes.set_title(direction.replace("_", " "), fontsize=9)
    panels[0][0].set_ylabel("ns an edge")
    return [_save(figure, panels, path, f"Plans by shared memory of a block, {_where(results)}")]


def over_atoms(
    results: Results,
    path: Path,
    panels: Sequence[Sequence[tuple[str, Mapping[str, Sequence[tuple[float, float]]]]]],
    title: str,
) -> Path:
    """Lines of panels of values over the number of atoms.

    Args:
        results: Whose machine the title names.
        path: Picture to write.
        panels: Of each panel its title and the points of each series.
        title: In front of the machine.
    """
    figure, grid = _grid(len(panels), len(panels[0]), 3.8, 2.9, sharey="none")
    names = dict.fromkeys(name for line in panels for _, series in line for name in series)
    others = iter(colour for colour in _COLOURS * 2 if colour not in _FAMILY_COLOURS.values())
    colours = {name: _FAMILY_COLOURS.get(name) or next(others) for name in names}
    for line, contents in zip(grid, panels, strict=True):
        for axes, (what, series) in zip(line, contents, strict=True):
            for name, points in series.items():
                _curve(axes, name, points, colours[name])
            axes.set_xscale("log")
            axes.set_yscale("log")
            sizes = sorted({atoms for points in series.values() for atoms, _ in points})
            axes.set_xticks(sizes, [f"{atoms:.0f}" for atoms in sizes], fontsize=8)
            axes.set_xticks([], minor=True)
            _plain_numbers(axes.yaxis)
            axes.set_xlabel("atoms")
            axes.set_title(what, fontsize=9)
    return _save(figure, grid, path, f"{title}, {_where(results)}")


def stacked(
    results: Results, path: Path, groups: Sequence[str], series: Series, totals: Sequence[str], label: str, title: str
) -> Path:
    """One panel of bars, each of which is a stack of all series.

    Args:
        results: Whose machine the title names.
        path: Picture to write.
        groups: A name for each bar.
        series: For each series a value for each bar, from the bottom up.
        totals: What stands above each bar.
        label: Of the axis.
        title: In front of the machine.
    """
    figure, panels = _grid(1, 1, max(5.0, 1.5 + 0.7 * len(groups)), 2.6)
    axes, heights = panels[0][0], [0.0] * len(groups)
    for (name, values), colour in zip(series.items(), _COLOURS, strict=False):
        axes.bar(range(len(groups)), values, 0.7, bottom=heights, label=name, color=colour)
        heights = [height + value for height, value in zip(heights, values, strict=True)]
    for number, (height, total) in enumerate(zip(heights, totals, strict=True)):
        axes.annotate(total, (number, height), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(groups)), groups, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_ylabel(label)
    return _save(figure, panels, path, f"{title}, {_where(results)}")


def grouped(
    results: Results, path: Path, groups: Sequence[str], series: Series, label: str, title: str, log: bool = True
) -> list[Path]:
    """One panel of groups of bars.

    Args:
        results: Whose machine the title names.
        path: Picture to write.
        groups: A name for each group.
        series: For each series a value for each group, None where there is none.
        label: Of the axis.
        title: In front of the machine.
        log: Whether the axis is logarithmic.
    """
    figure, panels = _grid(1, 1, max(5.0, 1.5 + 0.28 * len(groups) * (len(series) + 1)), 2.6)
    colours = {name: _FAMILY_COLOURS.get(name, colour) for name, colour in zip(series, _COLOURS * 2, strict=False)}
    _bars(panels[0][0], groups, series, [], colours, log)
    panels[0][0].set_ylabel(label)
    return [_save(figure, panels, path, f"{title}, {_where(results)}")]


def _curve(axes: Any, name: str, points: Sequence[tuple[float, float]], colour: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, color=colour, label=name)


def _grid(rows: int, columns: int, width: float, height: float, sharey: str = "row") -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width * columns, height * rows + 1.2)  # names of groups and a legend are below
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", sharey=sharey)


def _bars(
    axes: Any,
    groups: Sequence[str],
    series: Series,
    floors: Sequence[float | None],
    colours: Mapping[str, str],
    log: bool = True,
) -> None:
    """Groups of bars, and a line across each group where its floor is."""
    drawn = {name: values for name, values in series.items() if any(values)}
    width = 0.85 / max(len(drawn), 1)
    for number, (name, values) in enumerate(drawn.items()):
        known = [(i, value) for i, value in enumerate(values) if value]
        left = [i + (number - (len(drawn) - 1) / 2) * width for i, _ in known]
        axes.bar(left, [value for _, value in known], width, label=name, color=colours[name])
    limits = [(i, floor) for i, floor in enumerate(floors) if floor]
    for number, (i, floor) in enumerate(limits):
        axes.hlines(floor, i - 0.46, i + 0.46, color="black", linewidth=1, label=None if number else "floor")
    if log:
        axes.set_yscale("log")
    axes.set_xticks(range(len(groups)), groups, rotation=40, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_xlim(-0.6, len(groups) - 0.4)


def _plain_numbers(axis: Any) -> None:
    """Numbers such as 20 and 0.5 along a logarithmic axis, instead of powers of ten."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(ticker.NullFormatter())


def _save(figure: Any, panels: Any, path: Path, title: str) -> Path:
    from matplotlib import pyplot

    entries: dict[str, Any] = {}
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.3, alpha=0.6)
        axes.set_axisbelow(True)
        entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    inches = 0.7 + 0.065 * max(map(len, entries), default=0)
    columns = max(1, min(len(entries), int(figure.get_figwidth() / inches)))
    figure.legend(
        entries.values(), entries.keys(), fontsize=8, frameon=False, loc="outside lower center", ncols=columns
    )
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _distinct(results: Results, key: str | None) -> list[str]:
    """All values of a key in the order in which they come; without a key, all directions."""
    if key is None:
        return [name for name in DIRECTIONS if any(name in row for row in results["rows"])]
    timed = [row for row in results["rows"] if _timed(row)]
    return list(dict.fromkeys(row[key] for row in timed))


def _timed(row: Row) -> bool:
    return any(name in row for name in DIRECTIONS)


def _time(row: Row | None, direction: str) -> float | None:
    return None if row is None or direction not in row else row[direction]["median_ms"]


def _nanoseconds(row: Row | None, direction: str, time: Callable[[Row, str], float | None]) -> float | None:
    """An edge's part of a time."""
    found = None if row is None or direction not in row else time(row, direction)
    return None if found is None else 1e6 * found / row["edges"]


def _rate(row: Row | None, direction: str) -> float | None:
    return None if row is None else 1e3 * row["edges"] / row[direction]["median_ms"]


def _intensity_and_rate(found: Mapping[str, float]) -> tuple[float, float]:
    """Operations a byte of the floor, and billions of them a second."""
    return found["floor_flops"] / found["floor_bytes"], found["floor_flops"] / found["median_ms"] / 1e6


def _floor(row: Row, direction: str) -> float:
    found = row[direction]
    return max(found["floor_memory_ms"], found.get("floor_arithmetic_ms", 0.0))


def _floor_rate(rows: Iterable[Row], direction: str) -> float | None:
    return next((1e3 * row["edges"] / _floor(row, direction) for row in rows if direction in row), None)


def _where(results: Results) -> str:
    return f"{results['dtype']}, {results['environment']['device']}"
