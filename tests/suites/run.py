"""Runs test suites of other projects twice, as they are and on models patched by eqaccel, and compares the outcomes.

    python tests/suites/run.py mace [--only FILE ...] [--add] [--jobs N] [--out FOLDER] [options of pytest ...]

`./run suites` does so for every suite in its own environment. A test that passes as it is and not on patched models is
a fault of eqaccel: the exit status is 1 then. The outcomes of each file of tests go to `results/` and into the tables
of `docs/suites.md` as soon as it has run, so a suite can be run in parts, and parts in environments of their own. With
`--add`, parts of one file can be run one after another (`-k` of pytest's). What is kept of other versions of eqaccel or
of the tested package is dropped.

Tests come from the source distributions on PyPI, in the version that is installed; nothing of them is kept here.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
DOCS = HERE.parents[1] / "docs" / "suites.md"
BEGIN = "<!-- suites: written by tests/suites/run.py -->"
END = "<!-- end of suites -->"
OUTCOMES = ("passed", "failed", "skipped")
COLUMNS = ("file", *(f"{o} {k}" for k in ("plain", "patched") for o in OUTCOMES), "fail only patched", "patched models")


@dataclass(frozen=True)
class Suite:
    """A test suite of another project.

    Attributes:
        title: What the documentation calls it.
        package: Name on PyPI; its version is the one that is installed.
        tests: Where the tests are in its source distribution; None: `files` call the tests that are installed with it.
        files: Files of this folder that make tests of what the package brings.
        versions: Further packages that a reader wants to know the versions of.
    """

    title: str
    package: str
    tests: str | None = None
    files: tuple[str, ...] = ()
    versions: tuple[str, ...] = ("torch", "e3nn", "torch-sim-atomistic")


SUITES = {
    "mace": Suite("MACE, its `tests/`", "mace-torch", tests="tests"),
    "nequip": Suite(
        "NequIP, its tests of energy models on four models",
        "nequip",
        files=("nequip_energy_models.py", "nequip_trained.py"),
    ),
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


def files_of(suite: Suite, folder: Path) -> dict[str, Path]:
    """The files of a suite's tests by their names; downloads them where they have to be."""
    if suite.tests is None:
        return {file: HERE / file for file in suite.files}
    return {file.name: file for file in sorted((source_of(suite.package, folder) / suite.tests).glob("test_*.py"))}


def run(file: Path, installed: bool, folder: Path, patched: bool, options: list[str]) -> dict[str, tuple[str, str]]:
    """Runs one file of tests; returns outcome and message of every test by its name.

    Args:
        file: The file; pytest starts where the source distribution was unpacked, or in `folder`.
        installed: Whether the file calls tests that are installed, and so belongs to no source distribution.
        folder: Where the report, what pytest prints and the list of patched models go.
        patched: Whether models are patched.
        options: Further options of pytest's.
    """
    label = f"{file.stem}-{'patched' if patched else 'plain'}"
    report, log = folder / f"{label}.xml", folder / f"{file.stem}.log"
    report.unlink(missing_ok=True)
    environment = dict(os.environ)
    # e3nn 0.4.4 stores constants that torch.load reads only with this set.
    environment.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    if patched:
        log.unlink(missing_ok=True)
        paths = [str(HERE / "startup"), *filter(None, [environment.get("PYTHONPATH")])]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "EQACCEL_SUITES_LOG": str(log)}
    tests = [str(file), "--rootdir", str(folder), "-c", os.devnull, "--noconftest"] if installed else [str(file)]
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore"]
    command = [*pytest, f"--junitxml={report}", *tests, *options]
    with (folder / f"{label}.txt").open("w") as printed:
        work = folder if installed else file.parents[1]
        ended = subprocess.run(command, cwd=work, env=environment, stdout=printed, stderr=subprocess.STDOUT)
    if not report.exists():
        return {f"{file.name}": ("failed", f"pytest left no report and the status {ended.returncode}")}
    return read(report)


def read(report: Path) -> dict[str, tuple[str, str]]:
    """Outcome and message of every test in a report of pytest's; what fails in a fixture counts as failed."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                message = shorten(child.get("message", ""))
        name = f"{case.get('classname')}::{case.get('name')}"
        if found.get(name, ("",))[0] != "failed":  # a test that passes may fail in its teardown
            found[name] = (outcome, message)
    return found


def shorten(message: str) -> str:
    """A message on one line, without what differs between machines: commands with their options, and folders."""
    message = re.sub(r"Command '\[.*?(\]'|\[truncated.*)", "a program", " ".join(message.split()))
    return re.sub(r"(?<![\w:/.])/[^\s'\"]*/", "", message)[:300]


def compare(plain: dict[str, tuple[str, str]], patched: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Counts, why tests fail in both runs or are skipped, and those that fail, or are missing, when patched only."""
    missing = ("failed", "the test was not run")
    worse, both = {}, {}
    for test, (outcome, message) in sorted(plain.items()):
        other, reason = patched.get(test, missing)
        if outcome == "passed" and other != "passed":
            worse[test] = reason
        if outcome == other == "failed":
            both[test] = message
    return {
        "tests": sorted(plain),
        "plain": Counter(outcome for outcome, _ in plain.values()),
        "patched": Counter(outcome for outcome, _ in patched.values()),
        "worse": worse,
        "both fail": both,
        "skipped": Counter(message for outcome, message in plain.values() if outcome == "skipped"),
    }


def models(log: Path) -> dict[str, Any]:
    """How many models were patched, and why others were left as they were."""
    lines = [line.split("\t") for line in log.read_text().splitlines()] if log.exists() else []
    return {
        "patched models": sum(outcome == "patched" for _, _, outcome, _ in lines),
        "left models": Counter(f"{kind}: {why}" for _, kind, outcome, why in lines if outcome == "left"),
    }


def outcomes(suite: Suite, file: Path, folder: Path, options: list[str]) -> dict[str, Any]:
    """Runs one file of tests as it is and on patched models; returns what is kept of it."""
    plain, patched = (run(file, suite.tests is None, folder, patched, options) for patched in (False, True))
    result = {
        "date": datetime.date.today().isoformat(),
        "versions": versions_of(suite),
        "options": shlex.join(options),
    }
    return result | compare(plain, patched) | models(folder / f"{file.stem}.log")


def versions_of(suite: Suite) -> dict[str, str]:
    """Versions of eqaccel, of the package whose tests run, of those that they use, and of Python."""
    versions = {}
    for package in ("eqaccel", suite.package, *suite.versions):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions | {"Python": platform.python_version()}


def keep(name: str, file: str, result: dict[str, Any], files: list[str], add: bool = False) -> None:
    """Adds the outcomes of one file to those that are kept of the same versions, and writes the documentation.

    Args:
        name: Of the suite.
        file: Name of the file.
        result: Its outcomes, or those of some of its tests.
        files: Names of all files of the suite.
        add: Whether to keep what is there of other tests of this file.
    """
    store, suite = RESULTS / f"{name}.json", SUITES[name]
    results = json.loads(store.read_text())["results"] if store.exists() else {}
    tested = [result["versions"][package] for package in ("eqaccel", suite.package)]
    for other, old in list(results.items()):
        if [old["versions"][package] for package in ("eqaccel", suite.package)] != tested:
            del results[other]
    results[file] = added(results[file], result) if add and file in results else result
    RESULTS.mkdir(exist_ok=True)
    kept = {"title": suite.title, "files": files, "results": dict(sorted(results.items()))}
    store.write_text(json.dumps(kept, indent=1) + "\n")
    write_tables()


def added(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The outcomes of two parts of one file, which have no test in common and were run with the same versions."""
    if twice := set(old["tests"]) & set(new["tests"]):
        raise ValueError(f"--add: expected tests that are not kept yet, got {sorted(twice)}; leave --add out")
    if old["versions"] != new["versions"]:
        raise ValueError(f"--add: expected the versions {old['versions']}, got {new['versions']}; use that environment")
    result = dict(new)
    for key in ("plain", "patched", "skipped", "left models"):
        result[key] = Counter(old[key]) + Counter(new[key])
    for key in ("worse", "both fail"):
        result[key] = old[key] | new[key]
    result["patched models"] += old["patched models"]
    return result | {"tests": sorted(old["tests"] + new["tests"]), "options": f"{old['options']}; {new['options']}"}


def write_tables() -> None:
    """Writes what is kept into the documentation."""
    text = DOCS.read_text()
    DOCS.write_text("\n\n".join([text.split(BEGIN)[0] + BEGIN, tables(), END + text.split(END)[1]]))


def tables() -> str:
    """What the documentation says about all suites that have been run."""
    suites = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    if not suites:
        return "No outcomes are kept for this version: `./run suites` writes them."
    return "\n\n".join(table(suite) for suite in suites)


def table(suite: dict[str, Any]) -> str:
    """A table of a suite's files, and below it what fails, what is skipped and what was not run."""
    results = suite["results"]
    numbers = [counts(result) for result in results.values()]
    rows = [[f"`{file}`", *row] for file, row in zip(results, numbers, strict=True)]
    rows.append(["all", *(sum(column) for column in zip(*numbers, strict=True))])
    lines = [f"## {suite['title']}", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    left = [file for file in suite["files"] if file not in results]
    if left:
        lines += ["", "Not run: " + ", ".join(f"`{file}`" for file in left) + "."]
    worse = [(reason, test) for result in results.values() for test, reason in result["worse"].items()]
    both = [(reason, test) for result in results.values() for test, reason in result["both fail"].items()]
    lines += reasons("Run", [(circumstances(result), file) for file, result in results.items()])
    lines += reasons("Fail only on patched models", worse) + reasons("Fail with and without eqaccel", both)
    for title, key in (
        ("Skip themselves", "skipped"),
        ("Models that `patch` refused, and that ran as they were", "left models"),
    ):
        times = sum((Counter(result[key]) for result in results.values()), Counter())
        if times:
            lines += ["", f"{title}:", "", *(f"- {number} times {why}" for why, number in sorted(times.items()))]
    return "\n".join(lines)


def circumstances(result: dict[str, Any]) -> str:
    """When and with what a file was run."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['date']}, {versions}, `pytest {result['options']}`"


def counts(result: dict[str, Any]) -> list[int]:
    """The numbers of a file's row."""
    runs = [result[kind].get(outcome, 0) for kind in ("plain", "patched") for outcome in OUTCOMES]
    return [*runs, len(result["worse"]), result["patched models"]]


def reasons(title: str, tests: list[tuple[str, str]]) -> list[str]:
    """Lines that name the tests, or files, of each reason."""
    names: dict[str, list[str]] = {}
    for reason, test in sorted(tests):
        names.setdefault(reason, []).append(f"`{test}`")
    lines = [f"- {reason}: {', '.join(tests)}" for reason, tests in names.items()]
    return ["", f"{title}:", "", *lines] if lines else []


def main() -> int:
    """Runs the suite that was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--only", nargs="+", metavar="FILE", help="run these files of the suite, in this order")
    parser.add_argument("--add", action="store_true", help="add other tests of a file to those of it that are kept")
    parser.add_argument("--jobs", type=int, default=1, help="how many files run at the same time")
    parser.add_argument("--out", type=Path, default=Path("suites"), help="folder for downloads and reports")
    arguments, options = parser.parse_known_args()
    folder = arguments.out.resolve() / arguments.suite
    folder.mkdir(parents=True, exist_ok=True)
    suite = SUITES[arguments.suite]
    files = files_of(suite, folder)
    wanted = arguments.only or list(files)
    if unknown := set(wanted) - set(files):
        parser.error(f"--only takes files of {suite.title}, got {sorted(unknown)}; there are {', '.join(files)}")
    worse, patched = {}, 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(outcomes, suite, files[file], folder, options): file for file in wanted}
        for ended in as_completed(running):
            result = ended.result()
            keep(arguments.suite, running[ended], result, list(files), arguments.add)
            worse, patched = worse | result["worse"], patched + result["patched models"]
            numbers = ", ".join(f"{name} {number}" for name, number in zip(COLUMNS[1:], counts(result), strict=True))
            print(f"{running[ended]}: {numbers}", flush=True)
    for test, message in worse.items():
        print(f"fails only on patched models: {test}: {message}", file=sys.stderr)
    return 1 if worse or not patched else 0


if __name__ == "__main__":
    sys.exit(main())
