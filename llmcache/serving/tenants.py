"""Who makes a request, and what it may do."""

from dataclasses import dataclass
from typing import Final, Literal

Scope = Literal["infer", "admin"]

#: The namespace that everybody may read. Who writes it answers all, so only keys of it with the scope `admin` may.
PUBLIC: Final = "public"


@dataclass(frozen=True, slots=True)
class Tenant:
    """The holder of a key.

    Attributes:
        name: Of the key, for logs and metrics; never the key itself.
        namespace: In which its requests are stored and found; no request says otherwise.
        scopes: `infer` to have requests answered, `admin` for metrics, the page and all that changes the server.
        max_concurrent: Requests under way at once; None: as the server.
    """

    name: str
    namespace: str
    scopes: frozenset[Scope]
    max_concurrent: int | None = None


#: Whoever reaches a server without keys, which listens on this machine alone unless the operator says otherwise.
ANYONE: Final = Tenant("anyone", "default", frozenset(("infer", "admin")))
