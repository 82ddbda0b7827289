"""Watching a job from outside: what each rank says of itself, and how others come to see it.

```
 rank 1 ── report ──┐ MPI, when somebody asks
 rank 0 ── report ──┴─ gather ── publish: Unix socket, TCP port ── keras-dist top, --web
                          ├───── prometheus: HTTP
                          └───── callbacks.WriteScalars: TensorBoard
```
"""
