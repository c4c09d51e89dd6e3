"""``preflight`` lives in ``streamrl.preflight``: it looks at the machine and at user code, which the base must not."""

from streamrl.preflight import preflight

__all__ = ["preflight"]
