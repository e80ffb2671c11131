"""How things travel: frames, requests and answers, without sockets."""
