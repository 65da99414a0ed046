"""The report page of one or several runs."""
