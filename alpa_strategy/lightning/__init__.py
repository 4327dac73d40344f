"""What the strategy's hooks call: agreement between ranks, planning in a running job, the training
run itself.
"""
