"""Every World in tests compares the proposals of the fast scheduling pass with those of the plain one."""

from carma.testing.builders import PROPOSERS
from tests.plainly import propose_plainly

PROPOSERS.append(propose_plainly)
