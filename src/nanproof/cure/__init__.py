"""Find the smallest change that brings a dying run back to learning, and prove it by training.

    nanproof cure --budget 15m -- python train.py --config c.yaml

`command` is what is run, `surface` what of it can be changed, `kinds` the candidates, `scratch` and `trial` one trial,
`pool` where trials run, `judge` what they are worth, `search` the plan, `outcome` the answer, `remedy` what is written
for the user. Nothing of the user's is changed: trials run in scratch copies of the project.
"""
