"""What a cache needs to be calibrated, put together; what does not fit the model is refused here."""

import inspect
from dataclasses import dataclass

from torch import nn

from llmcache.assembly import make_fingerprint, refuse_unsafe
from llmcache.audit.audit import Audit, Compute
from llmcache.audit.recompute import Looks, Origin
from llmcache.calibration.calibrated_reuse import Trust
from llmcache.calibration.calibration import check_size
from llmcache.calibration.claim import Claim
from llmcache.calibration.observer import Observer
from llmcache.calibration.training import Teacher
from llmcache.config import CacheConfig
from llmcache.errors import CalibrationError, ConfigError
from llmcache.execution.components import Parts
from llmcache.fingerprint import Fingerprint, Learned
from llmcache.fingerprint.token_vectors import TokenVectors
from llmcache.matching.answers import Answers, Reading, find_answers
from llmcache.matching.decision import DECISIONS, Decision
from llmcache.models.adapters import first_attention
from llmcache.models.hooks import plain_forward
from llmcache.models.weights import Weights
from llmcache.reuse.chooser import Chooser
from llmcache.reuse.semantic import Semantic

_LEAVING = ("ttl", "divergence")  # policies that make entries leave, or be computed, whatever was calibrated


@dataclass(frozen=True, slots=True)
class Learning:
    """What is added to the parts of a cache.

    Attributes:
        fingerprint: Not fitted yet.
        attention: The first layer's self-attention where the fingerprint reads it, else None.
        observer: Reads the model's answers.
        trust: Not calibrated yet.
        audit: Looks into what it will serve.
    """

    fingerprint: Fingerprint
    attention: nn.Module | None
    observer: Observer
    trust: Trust
    audit: Audit

    def add_to(self, parts: Parts) -> None:
        """Serve calls with it from now on. Nothing is reused approximately until it is calibrated."""
        parts.fingerprint, parts.attention, parts.observer = self.fingerprint, self.attention, self.observer
        parts.rungs = [*parts.rungs, Semantic(parts.library, self.trust.chooser, self.trust)]
        parts.trust, parts.audit = self.trust, self.audit


def make_learning(
    parts: Parts, model: nn.Module, config: CacheConfig, answer_of: Reading, compute: Compute
) -> Learning:
    """Build what calibrates a cache.

    Args:
        parts: To which it will be added.
        model: As given to `wrap`.
        config: Settings.
        answer_of: Finds the answer in what the model returned.
        compute: Runs the wrapped model in a namespace, on tokenised inputs.

    Raises:
        ConfigError: A setting is wrong, or does not suit the model.
        UnsafeReuseError: The head answers token by token.
    """
    _check(parts, config)
    names = _names(model)
    if config.audit and names is not None and "input_ids" not in names:
        raise ConfigError(
            f"audit={config.audit}: a hit is computed again from input_ids, which {type(model).__name__}.forward() "
            f"does not take ({', '.join(sorted(names)) or 'nothing'}): name its argument so, or set audit=0"
        )
    fingerprint = make_fingerprint(config)
    tokens = None
    if isinstance(fingerprint, Learned):
        tokens = TokenVectors(parts.trunk, parts.payload, plain_forward(parts.trunk.module))
        fingerprint.bind(tokens.embed, tokens.think)
    answers = find_answers(config.answer, parts.head, model)
    if config.decide_component.name == "student":
        _check_student(parts, config, answers)
    decision: Decision = config.decide_component.build(DECISIONS, "decide")
    chooser = Chooser(parts.library, decision, answers, parts.gate)
    head = Weights(model, without=parts.trunk.module)
    claim = Claim(config.max_drop, config.delta, "changed", config.sources, 0)
    teacher = Teacher(parts.library, fingerprint, tokens, chooser, answers)

    def origin() -> Origin:
        """What decides the model's answers now."""
        return Origin(parts.weights.digest(), head.digest(), parts.trunk.attention)

    is_watched = config.audit > 0
    trust = Trust(parts.library, teacher, chooser, answers, head, parts.counters, config.learn, claim, is_watched)
    observer = Observer(parts.library, answers, answer_of, head)
    audit = Audit(
        parts.library,
        fingerprint,
        trust,
        observer,
        parts.weights,
        parts.counters,
        compute,
        Looks(getattr(parts.trunk.config, "pad_token_id", None) or 0, names),
        origin,
        config.audit,
        config.recalibrate,
        config.audit_in_background,
        config.audit_share,
    )
    observer.learner = audit
    attention = first_attention(parts.trunk) if fingerprint.reads_attention else None
    return Learning(fingerprint, attention, observer, trust, audit)


def _names(model: nn.Module) -> set[str] | None:
    """What a model may be passed by name; None: anything."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return None if takes_all else {parameter.name for parameter in parameters}


def _check(parts: Parts, config: CacheConfig) -> None:
    """Refuse settings under which no bound could be kept."""
    if config.tau is not None:
        raise ConfigError(
            f"tau={config.tau} is your own choice of what may be reused; to have it calibrated, wrap without tau"
        )
    refuse_unsafe("a calibration", parts.head, config)
    if parts.head.name == "multiple-choice head":
        raise ConfigError("a multiple-choice head answers several rows together: it cannot be calibrated row by row")
    if config.compression.name != "none":
        raise ConfigError(
            f"compression={config.compression.name!r}: what it changes is not part of the bound; calibrate with 'none'"
        )
    if not config.serves_exact:
        raise ConfigError(
            "exact=False: a calibration counts on repeats being served from their own states; leave it out"
        )
    if config.policy.name in _LEAVING:
        raise ConfigError(
            f"policy={config.policy.name!r}: the requests that a calibration rests on stay; use 'lru', 'lfu', 'fifo' "
            "or 'staleness'"
        )
    if config.learn is None:
        return
    try:
        check_size(config.learn, config.max_drop, config.delta)
    except CalibrationError as error:
        raise ConfigError(f"learn={config.learn}: {error}") from error
    if config.max_entries is not None and config.max_entries < config.learn:
        raise ConfigError(
            f"max_entries={config.max_entries}: some of the learn={config.learn} requests would have left before they "
            "could serve; raise it, or lower learn"
        )


def _check_student(parts: Parts, config: CacheConfig, answers: Answers) -> None:
    """Refuse settings under which a forecast alone could serve nothing, or past a gate."""
    if config.fingerprint_component.name != "learned":
        raise ConfigError(
            f"decide='student' with fingerprint={config.fingerprint.name!r}, which forecasts nothing: use 'learned' or "
            "'auto'"
        )
    if not answers.is_discrete:
        raise ConfigError(
            f"decide='student' with answer={answers.name!r}: an example stands for an answer that different requests "
            "have, a class or a set of labels; use decide='risk'"
        )
    if not parts.payload.fits_any_length:
        raise ConfigError(
            f"decide='student' with payload={parts.payload.name!r}: an example of an answer has another length than "
            "the request; use decide='risk', or a payload that fits any length"
        )
    if config.gate is not False:
        raise ConfigError(
            f"decide='student' with gate={config.gate}: the gate compares a request with the one that serves it, and "
            "here none is like it; use decide='risk' or 'combined', or leave the gate out"
        )
