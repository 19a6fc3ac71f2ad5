"""A byte-level language model: does the sign of the spring matter once every arm is warmed up and tuned alike?"""
