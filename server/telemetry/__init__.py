"""What a node says about its requests: the record of each room (:mod:`.record`, :mod:`.rooms`), and what is made of it,
latency metrics (:mod:`.latency`) and traces (:mod:`.traces`).

Plain data and clocks that others read: it imports nothing of ours but the shared types of requests and failures.
"""
