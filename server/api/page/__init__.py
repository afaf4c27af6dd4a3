"""The page that a browser shows at ``/``: HTML, style and scripts as they are, and the routes that serve them.

It reads ``/rooms``, ``/state``, ``/server_info`` and ``/ready``, and on a decode node asks ``/v1/chat/completions``.
"""

from server.api.page.route import PAGE_PATHS, page_router

__all__ = ["PAGE_PATHS", "page_router"]
