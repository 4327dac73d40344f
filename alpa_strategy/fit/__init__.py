"""Will it fit? A Hugging Face configuration becomes a plan for a cluster, without weights, devices
or network: `alpa plan hf:PATH --cluster NAME --seq 8192 --batch 512` (docs/will_it_fit.md).
"""
