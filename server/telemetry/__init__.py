"""What a node says about its requests: the record of each room (:mod:`.record`, :mod:`.rooms`), and what is made of it,
latency metrics (:mod:`.latency`) and traces (:mod:`.traces`).

The roles write the records; the HTTP layer reads them, as plain data.
"""
