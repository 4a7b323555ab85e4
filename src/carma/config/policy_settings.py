"""The settings that a policy declares. They form a section with the name of the policy: `[quiet-bus]` in a file,
`--set quiet-bus.weight=0.5`, `CARMA_QUIET_BUS__WEIGHT`.

A policy is imported only if a setting of it is given, or if it is the policy in use and its settings are shown.
"""

from __future__ import annotations

import difflib

from carma.config.catalogue import Setting, sections, settings_in
from carma.core.model.values import Record
from carma.plugins import POLICIES, load_policy, names


def policy_of(section: str) -> str | None:
    """The registered policy with that name; environment variables have `_` for `-`."""
    if section in sections():
        return None
    wanted = section.lower().replace("_", "-")
    return next((name for name in names(POLICIES) if name.lower().replace("_", "-") == wanted), None)


class PolicySettings:
    def __init__(self) -> None:
        self._defaults: dict[str, Record | None] = {}

    def defaults(self, policy: str) -> Record | None:
        if policy not in self._defaults:
            self._defaults[policy] = load_policy(policy).settings
        return self._defaults[policy]

    def of(self, policy: str) -> dict[str, Setting]:
        defaults = self.defaults(policy)
        return {} if defaults is None else settings_in(policy, defaults)

    def find(self, name: str) -> Setting | None:
        """The setting `quiet-bus.weight`; None if there is no such policy, or if it does not declare that setting."""
        section, _, key = name.partition(".")
        policy = policy_of(section)
        return None if policy is None else self.of(policy).get(f"{policy}.{key}")

    def nearest(self, name: str) -> str | None:
        """The most similar setting of that policy."""
        section, _, key = name.partition(".")
        policy = policy_of(section)
        if policy is None:
            return None
        return next(iter(difflib.get_close_matches(f"{policy}.{key}", self.of(policy), n=1)), None)
