"""The validation kit: what a person with an Atlas machine runs, and what runs here on CPU in the same way.

Five parts (`parts.PARTS`) each give a `Part` for the report; one that fails or breaks does not stop the others.
"""
