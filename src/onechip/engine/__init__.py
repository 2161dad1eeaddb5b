"""What runs next and at what shape: scheduler, buckets, the compiled step, sampling, the loop and its process.

The engine sees token ids, never text and never HTTP.
"""
