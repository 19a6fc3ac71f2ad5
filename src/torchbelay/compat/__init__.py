"""Other libraries' averaging classes on `ops`, one file per library; none of these libraries is imported here."""
