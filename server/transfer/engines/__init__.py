"""Ways to write into a peer's memory: ``base`` is the interface, ``mooncake`` the real one, ``loopback`` for tests,
``exposure`` says what none of them protects.

Nothing here knows rooms, components or messages, and nothing here imports from the rest of this project.
"""
