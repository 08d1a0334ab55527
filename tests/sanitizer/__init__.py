"""compute-sanitizer over calls that launch every kernel of fastlayers: ``python -m tests.sanitizer``."""
