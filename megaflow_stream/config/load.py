"""Reads the settings of a project: defaults < `pipeline.yaml` < environment < flags, with the origin of each value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_stream.config.settings import SECTIONS, Setting, Settings, settings
from megaflow_stream.config.values import from_text, from_yaml, suggestion
from megaflow_stream.config.yaml import Located, read_yaml
from megaflow_stream.errors import SettingError

FILE = "pipeline.yaml"
OTHER_KEYS = ("pipeline",)  # keys of the file that are no settings

# An address, an example of it, and what means nothing without it: the embedded service has credentials of its own.
_OF_EXISTING = (
    (
        "kafka.bootstrap_servers",
        "HOST:PORT",
        ("security_protocol", "sasl_mechanism", "username", "password", "ca_file"),
    ),
    ("s3.endpoint_url", "URL; AWS: https://s3.REGION.amazonaws.com", ("access_key", "secret_key", "region")),
)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Settings, where each came from, and the document that the other keys of `pipeline.yaml` stand in.

    origins: dotted name -> `default`, `pipeline.yaml:12`, `MEGAFLOW_KAFKA__BOOTSTRAP_SERVERS`, `--bootstrap-servers`.
    document: the keys of `pipeline.yaml`.
    """

    settings: Settings
    origins: Mapping[str, str]
    document: Mapping[str, Located]


def load(
    root: Path | None,
    flags: Mapping[str, str | None] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Loaded:
    """Settings for the project in `root`; without one, of the environment and flags alone.

    flags: dotted name -> text; None is not given. Raises `SettingError` with the place of what is wrong.
    """
    loaded = _read(root, flags or {}, os.environ if environment is None else environment)
    _check_together(loaded)
    _check_addressed(loaded)
    return loaded


def _read(root: Path | None, flags: Mapping[str, str | None], variables: Mapping[str, str]) -> Loaded:
    known = {setting.name: setting for setting in settings()}
    values = {name: setting.default for name, setting in known.items()}
    origins = dict.fromkeys(known, "default")
    document = _document(root)
    for name, located in _from_file(document, known).items():
        values[name] = _checked(known[name], located)
        origins[name] = f"{FILE}:{located.line}"
    for name, variable in _from_environment(variables, known).items():
        values[name] = _checked_text(known[name], variables[variable], variable)
        origins[name] = variable
    for name, text in flags.items():
        if text is not None:
            values[name] = _checked_text(known[name], text, known[name].flag)
            origins[name] = known[name].flag
    return Loaded(settings=_build(known, values), origins=origins, document=document)


def datasets(root: Path) -> tuple[str, ...]:
    """The datasets of the project in `root`, the default one first.

    For a definition file, which every process loads: no flag names a dataset, and an address that a flag gives is not
    missed here. Raises `SettingError`."""
    found = _read(root, {}, os.environ).settings
    return tuple(dict.fromkeys((found.publish.dataset, *found.datasets)))


def flag_environment(loaded: Loaded) -> dict[str, str]:
    """The variables that hand the values of flags on to a child process."""
    found = {}
    for setting in settings():
        if loaded.origins[setting.name].startswith("--"):
            value = loaded.settings.value(setting)
            found[setting.variable] = ",".join(value) if isinstance(value, tuple) else str(value)
    return found


def _document(root: Path | None) -> dict[str, Located]:
    if root is None:
        return {}
    top = read_yaml(root / FILE)
    if not isinstance(top.value, dict):
        raise top.error("the file must hold a mapping, `pipeline:` and sections of settings")
    known = [*OTHER_KEYS, *SECTIONS, *(s.name for s in settings() if "." not in s.name)]
    for key, located in top.value.items():
        if key not in known:
            raise located.error(f"{key!r} is not a key of {FILE}", suggestion(key, known))
    return dict(top.value)


def _from_file(document: Mapping[str, Located], known: Mapping[str, Setting]) -> dict[str, Located]:
    found: dict[str, Located] = {}
    for key, located in document.items():
        if key in known:
            found[key] = located
        if key not in SECTIONS or located.value is None:  # a section with all its lines commented out
            continue
        if not isinstance(located.value, dict):
            raise located.error(f"{key} must be a mapping of settings")
        names = [name.removeprefix(f"{key}.") for name in known if name.startswith(f"{key}.")]
        for name, value in located.value.items():
            if name not in names:
                raise value.error(f"{key} has no setting {name!r}", suggestion(name, names))
            found[f"{key}.{name}"] = value
    return found


def _from_environment(variables: Mapping[str, str], known: Mapping[str, Setting]) -> dict[str, str]:
    """name -> variable. One with `__`, or that lacks only that, is meant as a setting, and refused where it is none."""
    by_variable = {setting.variable: name for name, setting in known.items()}
    single = {variable.replace("__", "_") for variable in by_variable}
    found: dict[str, str] = {}
    for variable in variables:
        if variable in by_variable:
            found[by_variable[variable]] = variable
        elif variable in single or (variable.startswith("MEGAFLOW_") and "__" in variable):
            hint = suggestion(variable, by_variable)
            raise SettingError(f"the environment's {variable} is not a setting", hint=hint)
    return found


def _checked(setting: Setting, located: Located) -> Any:
    try:
        if located.value is None and setting.optional:
            return None
        return _in_range(setting, from_yaml(setting.kind, located.value))
    except ValueError as error:
        raise located.error(_wrong(setting, error)) from None


def _checked_text(setting: Setting, text: str, origin: str) -> Any:
    try:
        if not text and setting.optional:
            return None
        return _in_range(setting, from_text(setting.kind, text))
    except ValueError as error:
        raise SettingError(_wrong(setting, error), given_by=origin) from None


def _wrong(setting: Setting, error: ValueError) -> str:
    """The message; a secret's wrong value is not repeated."""
    return f"{setting.name} is wrong" if setting.secret else f"{setting.name}: {error}"


def _in_range(setting: Setting, value: Any) -> Any:
    if setting.choices and value not in setting.choices:
        raise ValueError(f"must be one of {', '.join(setting.choices)}, not {value!r}")
    if setting.check:
        setting.check(value)
    return value


def _build(known: Mapping[str, Setting], values: Mapping[str, Any]) -> Settings:
    top: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, setting in known.items():
        into = sections[setting.path[0]] if len(setting.path) > 1 else top
        into[setting.path[-1]] = values[name]
    return Settings(**top, **{section: SECTIONS[section](**inner) for section, inner in sections.items()})


def _check_together(loaded: Loaded) -> None:
    kafka = loaded.settings.kafka
    if kafka.security_protocol.startswith("SASL") and not (kafka.username and kafka.password):
        raise SettingError(
            f"kafka.security_protocol {kafka.security_protocol} needs kafka.username and kafka.password",
            hint="set MEGAFLOW_KAFKA__USERNAME and MEGAFLOW_KAFKA__PASSWORD",
            given_by=loaded.origins["kafka.security_protocol"],
        )


def _check_addressed(loaded: Loaded) -> None:
    """Refuses what is said of an existing service that no address is given for: the embedded one would be used."""
    known = {setting.name: setting for setting in settings()}
    for address, example, names in _OF_EXISTING:
        if loaded.settings.value(known[address]) is not None:
            continue
        section = address.partition(".")[0]
        said = [
            name
            for name in (f"{section}.{name}" for name in names)
            if loaded.settings.value(known[name]) != known[name].default
        ]
        if not said:
            continue
        message = (
            f"{' and '.join(said)} {'is' if len(said) == 1 else 'are'} given without {address}: "
            "the embedded service would be used, which takes no notice"
        )
        hint = f"set {address} ({example}), {known[address].variable} or {known[address].flag}; or take the others out"
        origin = loaded.origins[said[0]]
        if origin.startswith(f"{FILE}:"):
            raise loaded.document[section].value[said[0].partition(".")[2]].error(message, hint)
        raise SettingError(message, hint=hint, given_by=origin)
