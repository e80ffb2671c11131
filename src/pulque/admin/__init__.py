"""Administration over HTTP: one API for a whole cluster, served by its meta servers."""
