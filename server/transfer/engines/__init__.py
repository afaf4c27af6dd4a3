"""Ways to write bytes into a peer's memory: ``base`` is the interface, ``mooncake`` the real one, ``loopback`` the tests' one.

Nothing here knows rooms, components or messages, and nothing here imports from the rest of this project.
"""
