"""The page: how figures look, and how records become one HTML file. No experiment runs here."""
