"""Where the settings of ddtree serve come from: a file, then the environment, then flags, each over the one before."""

from __future__ import annotations

import argparse
import difflib
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ddtree.cli.serve_flags import add_serve

PREFIX = "DDTREE_"
# Of the environment, but no settings of the server.
RESERVED = ("DDTREE_CACHE", "DDTREE_CONFIG")
SECRET = ("api_key",)
INTERNAL = ("help", "config", "replica_index")
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Settings:
    """`args` as argparse would give them, and for each where its value is from."""

    def __init__(self, args: argparse.Namespace, origins: Mapping[str, str]):
        self.args, self.origins = args, origins

    def describe(self) -> list[str]:
        """For people: each setting that somebody made and who did, then those left at their defaults. Secrets are not shown."""
        lines, left = [], []
        for name, origin in self.origins.items():
            value = "(set)" if name in SECRET and getattr(self.args, name) else _shown(getattr(self.args, name))
            flag = name.replace("_", "-")
            if origin == "default":
                left.append(f"{flag} {value}")
            else:
                lines.append(f"setting {flag} {value}, from {origin}")
        return [*lines, f"default settings: {', '.join(left)}"]


def settle(argv: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """The settings that flags `argv` (after "serve"), environment and file make together.

    ValueError names the file or variable, the setting, the value and what it may be; argparse itself ends the program
    for flags at fault.
    """
    parser = argparse.ArgumentParser(prog="ddtree serve")
    add_serve(parser)
    actions = {action.dest: action for action in parser._actions if action.dest not in INTERNAL}
    defaults = {name: action.default for name, action in actions.items()}
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # so that what was not given is not there
    given = vars(parser.parse_args(list(argv)))
    path = given.pop("config", None) or environment.get("DDTREE_CONFIG")
    values: dict[str, object] = dict(defaults)
    origins = dict.fromkeys(defaults, "default")
    layers = [(f"{path}", _from_file(Path(path), actions) if path else {})]
    layers += [(PREFIX + name.upper(), {name: value}) for name, value in _from_environment(environment, actions).items()]
    layers.append(("a flag", given))
    for origin, layer in layers:
        for name, value in layer.items():
            values[name], origins[name] = value, origin
    values["replica_index"] = given.get("replica_index")
    values["config"] = path
    return Settings(argparse.Namespace(**values), origins)


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child that is told everything by flags."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(PREFIX) or name in RESERVED[:1]
    }


def _from_file(path: Path, actions: Mapping[str, argparse.Action]) -> dict[str, object]:
    """Settings in a TOML or YAML file, by the names of the flags."""
    found = {}
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name not in actions:
            raise ValueError(f"{path}: {key} is no setting{_meant(str(key), actions)}")
        found[name] = _of_file(actions[name], value, f"{path}: {key}")
    return found


def _read(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"--config {path}: no such file")
    kinds: dict[str, Callable[[str], object]] = {".toml": tomllib.loads, ".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in kinds:
        raise ValueError(f"--config {path}: must end in {', '.join(kinds)}")
    try:
        content = kinds[path.suffix](path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold names and values, such as port: 8000")
    return content


def _yaml(text: str) -> object:
    try:
        import yaml
    except ImportError:
        raise ValueError("reading YAML needs PyYAML: pip install pyyaml, or write TOML") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from None


def _from_environment(environment: Mapping[str, str], actions: Mapping[str, argparse.Action]) -> dict[str, object]:
    found = {}
    for key, text in sorted(environment.items()):
        if not key.startswith(PREFIX) or key in RESERVED:
            continue
        name = key.removeprefix(PREFIX).lower()
        if name not in actions:
            raise ValueError(f"the environment variable {key} is no setting{_meant(name, actions)}; unset it")
        action = actions[name]
        if _is_switch(action):
            if text.lower() not in (*TRUE, *FALSE):
                raise ValueError(f"{key} must be one of {', '.join((*TRUE, *FALSE))}, got {text!r}")
            found[name] = text.lower() in TRUE
        elif _is_list(action):
            found[name] = [_convert(action, part.strip(), key) for part in text.split(",")]
        else:
            found[name] = _convert(action, text, key)
    return found


def _of_file(action: argparse.Action, value: object, where: str) -> object:
    """A value as TOML and YAML know it -> as argparse would have it."""
    if _is_switch(action):
        if not isinstance(value, bool):
            raise ValueError(f"{where} must be true or false, got {json.dumps(value, default=str)}")
        return value
    if _is_list(action):
        values = value if isinstance(value, list) else [value]
        return [_convert(action, _plain(each, where), where) for each in values]
    if isinstance(value, list):  # --gpus: several in one value
        return _convert(action, ",".join(_plain(each, where) for each in value), where)
    return _convert(action, _plain(value, where), where)


def _plain(value: object, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{where} must be a text or a number, got {json.dumps(value, default=str)}")
    return str(value)


def _convert(action: argparse.Action, text: str, where: str) -> object:
    try:
        value = action.type(text) if action.type is not None else text
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{where} {error}") from None
    if action.choices is not None and value not in action.choices:
        raise ValueError(f"{where} must be one of {', '.join(map(str, action.choices))}, got {text!r}")
    return value


def _is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action, argparse._AppendAction)


def _meant(name: str, actions: Mapping[str, argparse.Action]) -> str:
    close = difflib.get_close_matches(name.replace("_", "-"), [each.replace("_", "-") for each in actions], 1)
    return f"; did you mean {close[0]}?" if close else ": see ddtree serve --help"


def _shown(value: object) -> str:
    if value is None or value == []:
        return "unset"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value).lower() if isinstance(value, bool) else str(value)
