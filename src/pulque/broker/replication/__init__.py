"""Replicate both logs within a broker group: the leader's and the follower's side."""
