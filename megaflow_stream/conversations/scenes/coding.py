"""A coding agent that reads a file, changes it and runs the tests."""

from __future__ import annotations

from typing import NamedTuple

from megaflow_stream.conversations.scenes.stage import Scene, Stage, words

AGENT = "You are a coding agent. Read before you write, and run the tests before you say that it works."
THINGS = words("order user invoice ticket sensor report basket account player lesson parcel recipe")
FIELDS = words("price size age score weight count total rating length height")


class Fault(NamedTuple):
    """A mistake in a line of code: what tests say of it, the line before and after, and what was wrong."""

    complaint: str
    before: str
    after: str
    cause: str


FAULTS = (
    Fault("assert {n} == {m}", "range(1, len({t}s))", "range(len({t}s))", "the loop left out the first {t}"),
    Fault("KeyError: '{f}'", "{t}['{f}']", "{t}.get('{f}', 0)", "a {t} may have no {f}"),
    Fault("ZeroDivisionError: division by zero", "total / len({t}s)", "total / max(len({t}s), 1)", "it took no {t}"),
    Fault("assert {n} == {m}", "if {f} > {n}:", "if {f} >= {n}:", "the limit of {f} was left out"),
    Fault("TypeError: 'NoneType' is not iterable", "for {t} in {t}s:", "for {t} in {t}s or []:", "{t}s may be None"),
    Fault("assert '{f}' == '{f} '", "line.split(',')", "line.strip().split(',')", "the line kept its last space"),
)


def _tools(stage: Stage) -> None:
    stage.system(AGENT)
    stage.offer("read_file", "Reads a file", "path")
    stage.offer("replace", "Replaces text in a file", "path", "old", "new")
    stage.offer("run_tests", "Runs the tests", "path")


def fix_bug(stage: Stage) -> None:
    _tools(stage)
    thing, field = stage.pick(THINGS), stage.pick(FIELDS)
    count = stage.number(2, 90)
    names = {"t": thing, "f": field, "n": str(count), "m": str(count + 1)}
    fault = Fault(*(part.format_map(names) for part in stage.pick(FAULTS)))
    path, test = f"src/{thing}s.py", f"tests/test_{thing}s.py"
    asked = (
        "{0} fails: {1}. Please fix it.",
        "Can you make {0} pass? It says {1}.",
        "I get {1} from {0}. What is wrong?",
    )
    stage.user(stage.pick(asked).format(test, fault.complaint))
    stage.call("read_file", f"def {field}_of({thing}s):\n    value = {fault.before}\n    return value", path=path)
    stage.call("replace", "1 replacement", path=path, old=fault.before, new=fault.after)
    passed = stage.number(3, 48)
    if stage.maybe(0.25):
        stage.call("run_tests", "error: tests not found", path=f"test_{thing}s.py")
    stage.call("run_tests", f"{passed} passed", path=test)
    stage.assistant(f"Fixed: {fault.cause}. I changed `{fault.before}` to `{fault.after}`; {passed} tests pass.")
    if stage.maybe(0.4):
        stage.user(stage.pick(("Which file was it?", "Where did you change it?")))
        stage.assistant(f"In `{path}`, in the function `{field}_of`.")


def add_function(stage: Stage) -> None:
    _tools(stage)
    thing, field = stage.pick(THINGS), stage.pick(FIELDS)
    what, code = stage.pick(
        (
            ("the largest", f"max({thing}.{field} for {thing} in {thing}s)"),
            ("the smallest", f"min({thing}.{field} for {thing} in {thing}s)"),
            ("the sum of every", f"sum({thing}.{field} for {thing} in {thing}s)"),
            ("the mean", f"mean({thing}.{field} for {thing} in {thing}s)"),
        )
    )
    name = f"{what.split()[1]}_{field}"
    path = f"src/{thing}s.py"
    stage.user(f"Add a function to {path} that returns {what} {field} of a list of {thing}s.")
    lines = stage.number(4, 120)
    stage.call("read_file", f"# {lines} lines\nclass {thing.title()}:\n    {field}: int", path=path)
    body = f"def {name}({thing}s):\n    return {code}"
    stage.call("replace", "1 replacement", path=path, old=f"    {field}: int", new=f"    {field}: int\n\n\n{body}")
    passed = stage.number(3, 48)
    stage.call("run_tests", f"{passed} passed", path=f"tests/test_{thing}s.py")
    stage.assistant(f"I added `{name}` to `{path}`:\n```python\n{body}\n```\n{passed} tests pass.")
    if stage.maybe(0.3):
        stage.thanks()


def explain(stage: Stage) -> None:
    stage.system(AGENT)
    thing, field = stage.pick(THINGS), stage.pick(FIELDS)
    limit = stage.number(2, 99)
    code, meaning = stage.pick(
        (
            (f"sorted({thing}s, key=lambda x: x.{field})", f"all {thing}s, the smallest {field} first"),
            (f"[x for x in {thing}s if x.{field} > {limit}]", f"the {thing}s whose {field} is above {limit}"),
            (f"{{x.{field} for x in {thing}s}}", f"every {field} of the {thing}s, each one once"),
            (f"any(x.{field} < {limit} for x in {thing}s)", f"whether a {thing} has a {field} below {limit}"),
            (f"{thing}s[-{limit}:]", f"the last {limit} {thing}s"),
        )
    )
    stage.user(
        stage.pick(("What does `{}` give?", "Explain `{}` to me.", "Please tell me what `{}` means.")).format(code)
    )
    stage.assistant(f"`{code}` gives {meaning}.")
    if stage.maybe(0.5):
        stage.user(stage.pick(("And if the list is empty?", "What if there is none?")))
        stage.assistant("Then the answer is False." if code.startswith("any") else "Then the answer is empty.")


SCENES: tuple[Scene, ...] = (fix_bug, add_function, explain)
