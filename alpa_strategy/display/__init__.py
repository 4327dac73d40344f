"""What a user sees: the plan as a table or a picture, progress while planning, predicted against
measured.
"""
