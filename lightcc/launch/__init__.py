"""How ranks are started on hosts, watched and ended: what lightccrun, run() and elastic jobs share."""
