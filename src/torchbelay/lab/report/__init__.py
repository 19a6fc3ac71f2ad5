"""The report: how figures look, and how records become one HTML page. No experiment runs here."""
