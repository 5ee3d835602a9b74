"""The apparatus around minikv: set-up, models, engines, checks, pictures."""
