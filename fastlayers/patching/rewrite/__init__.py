"""The engine: rules applied to a recording, the proof that each match is safe, the generated code and classes."""
