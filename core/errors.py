"""The exception for mistakes of the caller, and the messages that recur."""

import difflib
import math
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake of the caller, explained in one sentence; scripts print it and exit with code 2."""


def check_positive(**named_values: float) -> None:
    """Raises a `UserError` that names the first value that is not positive and finite."""
    for name, value in named_values.items():
        if not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} must be positive and finite, not {value}.")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for an unknown `kind` of thing; lists the known ones and suggests the nearest."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return UserError(f"Unknown {kind} '{name}'.{hint} Known: {', '.join(known)}.")
