"""The real managers of prefill and decode nodes in virtual time, by seed: a lossy network, failing engines and
transports, crashes.

:mod:`.world` is the weather, the clients, and what must hold. :mod:`.nodes` wires the managers as the real nodes do, on
what is simulated: the event loop and its clock (:mod:`.loop`), the control connections (:mod:`.network`), engines
(:mod:`.engine`) and senders (:mod:`.sender`). :mod:`.memory` is real memory that knows who may write where.
"""
