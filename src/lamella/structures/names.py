"""What a mistyped name may have meant."""

import difflib
from collections.abc import Iterable


def suggest(given: str, known: Iterable[str]) -> str:
    """ ", did you mean ...?" if one of the known names is close, ignoring case, else the empty string."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(given.lower(), by_lower, n=1, cutoff=0.5)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""
