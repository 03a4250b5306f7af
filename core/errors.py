"""The one exception that means "what you asked for cannot be", and the sentences it carries."""

import difflib
import math
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake of the caller, told in one sentence; scripts print it and exit with code 2."""


def check_positive(**named_values: float) -> None:
    """Raises a `UserError` that names the first value that is not positive and finite."""
    for name, value in named_values.items():
        if not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} must be positive and finite, not {value}.")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Says that `name` is no known `kind`, what the known ones are, and which is nearest."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return UserError(f"Unknown {kind} '{name}'.{hint} Known: {', '.join(known)}.")
