"""The meta server: who belongs to the cluster, and who serves which subject."""
