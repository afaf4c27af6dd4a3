"""The DeepSeek-V4 network in plain torch: no sockets, no scheduling. Parameter names are the official checkpoint's.

Reads and writes the pools of ``server.cache``; imports nothing else of this project.
"""
