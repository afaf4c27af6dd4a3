from tests.transfer_engines.conftest import results, start_engine, start_peer

__all__ = ["results", "start_engine", "start_peer"]
