"""Sharding a model with FSDP2. Nothing here knows of Lightning.

options       what the user asked for
mesh          which ranks hold replicas, shards, parts of a layer
wrapping      which modules become units of their own
initialize    allocate meta tensors, make replicas equal
shard         apply all of the above to a model, once
root_forward  run steps of the model as its forward, in automatic and manual optimization
clipping      gradient norms over several meshes
"""
