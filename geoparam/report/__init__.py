"""Run folders in, one HTML page out: it loads nothing from elsewhere and needs no server.

from geoparam import report
report.write(["runs/levy", "runs/uci"], "report.html")
"""

from geoparam.report.page import MARK, page, write

__all__ = ["MARK", "page", "write"]
