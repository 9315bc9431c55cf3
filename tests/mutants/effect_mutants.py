"""The mutants of the effect protocol, in the form of the table in test_mutants.py: name, policy, scenario, edits."""

PAID = "revise release=commit"
HELD = "revise_plus"
EFFECTS = "core.effects:Effecting"
MAY_SEND = f"{EFFECTS}._may_send"

EFFECT_MUTANTS = (
    (
        "authorisation is a licence: it leaves although its node is not settled",
        PAID,
        "effect_revised",
        ((MAY_SEND, "and run.settled", "and True"),),
    ),
    (
        "publish before check: it leaves without being asked again",
        PAID,
        "zombie_effect",
        ((MAY_SEND, "and run.settled", "and True"), (MAY_SEND, "and record.attempt == run.current.id", "and True")),
    ),
    (
        "no epoch: a publication after a compensation has the same key",
        PAID,
        "effect_aba",
        ((f"{EFFECTS}._gone", "box.epoch += 1", "pass"), (f"{EFFECTS}._intent", "box.epoch + ahead", "box.epoch")),
    ),
    (
        "keyed by payload",
        PAID,
        "effect_aba",
        (
            (
                f"{EFFECTS}._intent",
                "box.epoch + ahead",
                "ord(str((record or box.live or box.waiting).effect.payload)[0])",
            ),
        ),
    ),
    (
        "an unknown is sent again",
        HELD,
        "effect_and_kill",
        ((f"{EFFECTS}._on_recover", 'ev.Act("find"', 'ev.Act("publish"'),),
    ),
    (
        "compensated twice",
        PAID,
        "effect_revised",
        (
            (
                f"{EFFECTS}._may_undo",
                "if record.state is not S.TO_COMPENSATE:",
                "if not record.unwanted or not record.landed:",
            ),
            (
                f"{EFFECTS}._set_effect",
                "EFFECTS[record.state, what]",
                "EFFECTS.get((record.state, what), record.state)",
            ),
        ),
    ),
    (
        "released before the close",
        HELD,
        "effect_revised",
        ((f"{EFFECTS}._release", "elif early or", "elif True or"),),
    ),
    (
        "what is restored is not staged again",
        "revise_plus release=commit compensation=eager",
        "effect_aba",
        (
            (
                f"{EFFECTS}._weigh_effects",
                "if d_settled > 0 or",
                "if (d_settled > 0 and run.current and run.current.v_commit == self.version) or",
            ),
        ),
    ),
    (
        "a new payload does not wait for the old one to be undone",
        PAID,
        "effect_revised",
        ((MAY_SEND, "and box.live is None", "and True"),),
    ),
    (
        "what a member has published stays when the member goes",
        PAID,
        "effect_of_a_member",
        ((f"{EFFECTS}._weigh_effects", "run.active is False", "False"),),
    ),
    (
        "what a node has published stays when it fails",
        PAID,
        "effect_of_a_failure",
        ((f"{EFFECTS}._weigh_effects", "run.current.failed", "False"),),
    ),
    (
        "a reader takes the confirmation of another payload",
        PAID,
        "confirmation_read",
        ((f"{EFFECTS}._confirmed", "return False", "return True"),),
    ),
    (
        "an irreversible effect leaves early without consent",
        HELD,
        "confirmation_of_irreversible",
        ((f"{EFFECTS}._release", "if read and", "if False and"),),
    ),
    (
        "nobody is asked",
        PAID,
        "asked_first",
        (
            (
                f"{EFFECTS}._release",
                "or self.is_asked(record)",
                "or False",
            ),
        ),
    ),
    (
        "a denial is forgotten",
        HELD,
        "asked_first",
        ((f"{EFFECTS}._on_authorise", "if not event.granted:", "if False:"),),
    ),
    (
        "undone in any order",
        PAID,
        "effects_of_a_chain",
        ((f"{EFFECTS}._may_undo", "other.live.order > record.order", "False"),),
    ),
    (
        "what is equal is undone and sent again",
        PAID,
        "effect_kept",
        ((f"{EFFECTS}._reconcile_slot", "live.effect.same(effect)", "False"),),
    ),
    (
        "a call that was dispatched is forgotten with the power",
        HELD,
        "effect_and_power",
        (("records.event:is_durable", "entry.state in _DURABLE", 'entry.state in _DURABLE - {"dispatched"}'),),
    ),
    (
        "a compensation that was sent is forgotten with the power",
        PAID,
        "undo_and_power",
        (("records.event:is_durable", "entry.state in _DURABLE", 'entry.state in _DURABLE - {"compensating"}'),),
    ),
    (
        "a compensation that may have been sent is taken back after a crash",
        PAID,
        "undo_and_kill",
        ((f"{EFFECTS}._reconcile_slot", "and not live.undo_sent:", "and True:"),),
    ),
    (
        "an effect that cannot be undone is forgotten",
        PAID,
        "irreversible_published",
        ((f"{EFFECTS}._unwant", "final = record.effect.reversibility == Reversibility.IRREVERSIBLE", "final = False"),),
    ),
    (
        "what is wanted again stays blocked",
        PAID,
        "irreversible_aba",
        ((f"{EFFECTS}._reconcile_slot", "(live.state is S.BLOCKED and live.landed)", "False"),),
    ),
    (
        "a refusal is sent again without deciding again",
        HELD,
        "refused_for_good",
        ((f"{EFFECTS}._gone", "if event.answer is Answer.REFUSED and", "if False and"),),
    ),
    (
        "refused once, the node is not asked again",
        HELD,
        "refused_by_target",
        ((f"{EFFECTS}._refused", "if run.refusals < run.node.retries:", "if False:"),),
    ),
    (
        "no answer is taken for a good one",
        HELD,
        "answer_never",
        (
            (
                f"{EFFECTS}._on_answered",
                "what = str(event.answer)",
                'what = "landed" if event.answer == "unsure" else str(event.answer)',
            ),
        ),
    ),
    (
        "an answer that was lost is asked for by sending again",
        HELD,
        "answer_lost",
        ((f"{EFFECTS}._on_answered", 'ev.Act("find"', 'ev.Act("publish"'),),
    ),
    (
        "a compensation without an answer is taken for done",
        PAID,
        "undo_hangs",
        (
            (
                f"{EFFECTS}._on_answered",
                "what = str(event.answer)",
                'what = "undone" if event.answer == "unsure" and record and record.undo_sent else str(event.answer)',
            ),
            (
                f"{EFFECTS}._on_answered",
                "self._set_effect(box, record, what, event.reason)",
                "self._set_effect(box, record, what, event.reason); event = event._replace(answer=what)",
            ),
        ),
    ),
    (
        "a compensation that failed is taken for done",
        PAID,
        "undo_fails",
        (
            (
                f"{EFFECTS}._on_answered",
                "what = str(event.answer)",
                'what = "undone" if event.answer == "stuck" else str(event.answer)',
            ),
            (
                f"{EFFECTS}._on_answered",
                "self._set_effect(box, record, what, event.reason)",
                "self._set_effect(box, record, what, event.reason); event = event._replace(answer=what)",
            ),
        ),
    ),
    (
        "a decision that comes out differently is kept",
        HELD,
        "another_decision",
        (
            (
                "core.machine:Machine._on_reconsidered",
                "if not equal(event.output, attempt.outcome.output):",
                "if False:",
            ),
        ),
    ),
    (
        "a decision that is made again keeps what it read before",
        HELD,
        "same_decision",
        (
            ("core.machine:Machine._on_reconsidered", "(*kept, *event.reads)", "attempt_reads"),
            ("core.machine:Machine._on_reconsidered", "kept = [", "attempt_reads = tuple(attempt.reads); kept = ["),
        ),
    ),
)
