"""The one exception that means "what you asked for cannot be", and the sentences it carries."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake of the caller, told in one sentence; scripts print it and exit with code 2."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Says that `name` is no known `kind`, what the known ones are, and which is nearest."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    return UserError(f"Unknown {kind} '{name}'.{hint} Known: {', '.join(known)}.")
