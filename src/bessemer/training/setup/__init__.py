"""From a resolved recipe to a run that can start: model, data, optimizer, horizon, compiled steps."""
