"""Write training runs to disk and read them back, on any mesh."""
