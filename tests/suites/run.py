"""Runs test suites of other projects twice, as they are and on models patched by eqaccel, and compares the outcomes.

    python tests/suites/run.py mace [--out FOLDER] [options of pytest ...]

`./run suites` does so for every suite in its own environment. A test that passes as it is and not on patched models is
a fault of eqaccel: the exit status is 1 then. The outcomes go to `results/` and into the tables of `docs/suites.md`.

Tests come from the source distributions on PyPI, in the version that is installed; nothing of them is kept here.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DOCS = HERE.parents[1] / "docs" / "suites.md"
BEGIN = "<!-- suites: written by tests/suites/run.py -->"
END = "<!-- end of suites -->"
OUTCOMES = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Suite:
    """A test suite of another project.

    Attributes:
        title: What the table calls it.
        package: Name on PyPI; its version is the one that is installed.
        tests: Where the tests are in its source distribution; None: `file` calls the tests that are installed with it.
        file: A file of this folder that makes tests of what the package brings.
        versions: Further packages that a reader wants to know the versions of.
    """

    title: str
    package: str
    tests: str | None = None
    file: str | None = None
    versions: tuple[str, ...] = ("torch", "e3nn", "torch-sim-atomistic")


SUITES = {
    "mace": Suite("MACE, all of `tests/`", "mace-torch", tests="tests"),
    "nequip": Suite("NequIP, its tests of energy models on four models", "nequip", file="nequip_suite.py"),
}


def source_of(package: str, folder: Path) -> Path:
    """The unpacked source distribution of an installed package, downloaded unless it is there."""
    wanted = f"{package}=={importlib.metadata.version(package)}"
    name = wanted.replace("-", "_").replace("==", "-")
    if not (folder / name).is_dir():
        download = ["download", "--quiet", "--no-deps", "--no-binary", package, "--dest", str(folder), wanted]
        subprocess.run([sys.executable, "-m", "pip", *download], check=True)
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder / name


def outcomes(suite: Suite, name: str, folder: Path, patched: bool, options: list[str]) -> dict[str, tuple[str, str]]:
    """Runs a suite; returns outcome and message of every test by its name."""
    kind = "patched" if patched else "plain"
    report, log = folder / f"{name}-{kind}.xml", folder / f"{name}.log"
    environment = dict(os.environ)
    # e3nn 0.4.4 stores constants that torch.load reads only with this set.
    environment.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    if patched:
        log.unlink(missing_ok=True)
        paths = [str(HERE / "startup"), *filter(None, [environment.get("PYTHONPATH")])]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "EQACCEL_SUITES_LOG": str(log)}
    work = source_of(suite.package, folder) if suite.tests else folder
    tests = [suite.tests] if suite.tests else [str(HERE / str(suite.file)), "--rootdir", str(folder), "-c", os.devnull]
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore"]
    subprocess.run([*pytest, f"--junitxml={report}", *tests, *options], cwd=work, env=environment, check=False)
    return read(report)


def read(report: Path) -> dict[str, tuple[str, str]]:
    """Outcome and message of every test in a report of pytest's; what fails in a fixture counts as failed."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                message = " ".join(child.get("message", "").split())[:300]
        name = f"{case.get('classname')}::{case.get('name')}"
        if found.get(name, ("",))[0] != "failed":  # a test that passes may fail in its teardown
            found[name] = (outcome, message)
    return found


def compare(plain: dict[str, tuple[str, str]], patched: dict[str, tuple[str, str]]) -> dict[str, object]:
    """Counts, the tests that fail in both, and those that fail, or are missing, on patched models only."""
    passed = {test for test, (outcome, _) in plain.items() if outcome == "passed"}
    missing = ("failed", "the test was not run")
    return {
        "plain": Counter(outcome for outcome, _ in plain.values()),
        "patched": Counter(outcome for outcome, _ in patched.values()),
        "worse": {t: patched.get(t, missing)[1] for t in sorted(passed) if patched.get(t, missing)[0] != "passed"},
        "both fail": sorted(t for t, (o, _) in plain.items() if o == "failed" and patched.get(t, ("",))[0] == "failed"),
    }


def models(log: Path) -> dict[str, object]:
    """How many models were patched, and why others were left as they were."""
    lines = [line.split("\t") for line in log.read_text().splitlines()] if log.exists() else []
    return {
        "patched models": sum(outcome == "patched" for _, _, outcome, _ in lines),
        "left models": Counter(f"{kind}: {why}" for _, kind, outcome, why in lines if outcome == "left"),
    }


def tables() -> str:
    """What the documentation says about all suites that have been run."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    if not results:
        return "No outcomes are kept for this version: `./run suites` writes them."
    columns = (
        "suite",
        "passed plain",
        "passed patched",
        "skipped",
        "fail in both",
        "fail only patched",
        "patched models",
    )
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for result in results:
        plain, patched = result["plain"], result["patched"]
        cells = [result["title"], plain.get("passed", 0), patched.get("passed", 0), patched.get("skipped", 0)]
        cells += [len(result["both fail"]), len(result["worse"]), result["patched models"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for result in results:
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        lines += ["", f"**{result['title']}**: {result['date']}, {versions}."]
        if result["worse"]:
            lines += ["", "Fail only on patched models:", ""]
            lines += [f"- `{test}`: {message}" for test, message in result["worse"].items()]
        if result["both fail"]:
            lines += ["", "Fail with and without eqaccel: " + ", ".join(f"`{t}`" for t in result["both fail"]) + "."]
        if result["left models"]:
            lines += ["", "Models that `patch` refused, and that ran as they were:", ""]
            lines += [f"- {count} times {why}" for why, count in result["left models"].items()]
    return "\n".join(lines)


def main() -> int:
    """Runs the suites that were asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--out", type=Path, default=Path("suites"), help="folder for downloads and reports")
    arguments, options = parser.parse_known_args()
    folder = arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    suite = SUITES[arguments.suite]
    plain, patched = (outcomes(suite, arguments.suite, folder, patched, options) for patched in (False, True))
    versions = {}
    for package in ("eqaccel", suite.package, *suite.versions):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    result = {"title": suite.title, "date": datetime.date.today().isoformat(), "versions": versions}
    result |= compare(plain, patched) | models(folder / f"{arguments.suite}.log")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{arguments.suite}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = DOCS.read_text()
    DOCS.write_text("\n\n".join([text.split(BEGIN)[0] + BEGIN, tables(), END + text.split(END)[1]]))
    for test, message in result["worse"].items():
        print(f"fails only on patched models: {test}: {message}", file=sys.stderr)
    return 1 if result["worse"] or not result["patched models"] else 0


if __name__ == "__main__":
    sys.exit(main())
