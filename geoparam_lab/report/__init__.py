"""Run folders in, one HTML page out: it loads nothing from elsewhere and needs no server.

from geoparam_lab import report
report.write(["runs/levy", "runs/uci"], "report.html")
"""

from geoparam_lab.report.page import MARK, make_page, write

__all__ = ["MARK", "make_page", "write"]
